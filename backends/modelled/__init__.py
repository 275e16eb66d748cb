"""An engine that takes modelled time: the books of a real one, no numbers, and a price for every operation."""
