"""What a policy keeps of the model's attention, judged from recorded attention without running the model again."""
