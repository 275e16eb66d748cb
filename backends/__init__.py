"""Engines behind one protocol, and the Session that is their only controller."""
