"""A server whose sessions are on tape, and a tape for processes that serve already."""
