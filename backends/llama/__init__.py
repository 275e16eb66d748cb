"""llama.cpp through llama-cpp-python's low-level API: a `LlamaEngine` per model file, a `LlamaBackend` per session."""
