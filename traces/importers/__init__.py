"""Other people's traces, read into ordinary rows: one small reader a format, one protocol."""
