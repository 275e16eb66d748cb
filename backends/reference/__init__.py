"""The arithmetic truth: a decoder in NumPy, and the KV engines that run on it through one dispatch."""
