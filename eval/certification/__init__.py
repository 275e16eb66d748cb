"""Certification: what each storage type of the KV cache costs on a model, measured and held against thresholds."""
