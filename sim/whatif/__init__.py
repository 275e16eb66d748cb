"""Many simulations of one log: which policy, which budget, on this traffic."""
