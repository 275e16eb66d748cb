// Nothing to start yet.
