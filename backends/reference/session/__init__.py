"""The reference as a backend of sessions: rows that surgery can be done on, or a KV engine of the catalogue."""
