"""Engines in a process of their own: a native crash of an engine ends its sessions, not the program."""
