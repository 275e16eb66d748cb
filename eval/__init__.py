"""Does a policy keep what matters: recall of planted facts, likelihood of long texts, on real engines."""
