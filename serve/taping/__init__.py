"""A tape for engines that a process drives by itself: wrappers that record, and change nothing."""
