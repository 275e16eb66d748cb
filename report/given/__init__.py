"""What other commands found and a report is given as JSON: the shapes that are read, and reading them strictly."""
