"""Speculation: tokens are proposed, looked at in one engine call, and kept where the model says the same itself."""
