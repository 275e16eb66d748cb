"""From numbers to figures and tables."""
