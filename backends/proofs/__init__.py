"""What was proven here: rows of certification and of gates, by model, engine, machine class and subject."""
