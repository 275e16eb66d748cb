"""The report: one self-contained HTML page of a log. Start at `panel` (what a page is made of) and `panels`."""
