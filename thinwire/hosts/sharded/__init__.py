"""Our own sharded optimizer: weights, gradients and the optimizer's state cut over groups of ranks."""
