"""What a model is and what its KV cache weighs: geometry read from a GGUF header."""
