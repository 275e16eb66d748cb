"""Eviction policies over whole blocks, one class each, all of one protocol."""
