"""The gate: A/B turns that say whether an optimisation may be switched on for a model, an engine and a machine."""
