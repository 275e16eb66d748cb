"""What a report shows, as plain frozen dataclasses: read from a log or from results, and how it was aggregated."""
