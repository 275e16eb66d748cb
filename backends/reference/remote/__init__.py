"""Feed-forward layers, and whole sessions, at a server."""
