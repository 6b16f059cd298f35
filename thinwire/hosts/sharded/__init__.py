"""thinwire's own sharded optimizer: weights, gradients and optimizer state, cut over groups of ranks."""
