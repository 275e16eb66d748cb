"""An engine in a process of its own, so that a fault that kills it does not kill the session."""
