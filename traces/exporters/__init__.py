"""A log written out in other formats."""
