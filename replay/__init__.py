"""Verbatim replay of a log on real engines: lineage, reference, judge, replayer, report."""
