"use strict";
// Colour themes, and small helpers that every drawing uses.
