"""The world a simulated session lives in: what is asked of it, and the machine that serves it."""
