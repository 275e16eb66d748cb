"""Pictures that the command line draws: SVG by hand, so that one answer is one sequence of bytes on every machine."""
