"""A small recorded log that comes with the package, so that what needs no engine can be tried at once."""
