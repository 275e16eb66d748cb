"""What operations cost: learnt from a log, or supposed from the numbers of a machine."""
