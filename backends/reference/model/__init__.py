"""The arithmetic: a GGUF's weights and one decoder's layers as pure steps, in NumPy."""
