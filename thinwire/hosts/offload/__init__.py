"""Where the tensors of a sharded host lie, and when they come and go."""
