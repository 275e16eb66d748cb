"""One decision of a recorded session: what was there, what went and why, and what else could have been decided."""
