"""Which blocks of prompts stay in a shared cache, at every budget: hit rates from the log of a fleet."""
