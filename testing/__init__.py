"""What others test their own backends and policies with: a toy backend, strategies, a conformance suite for pytest."""
