"""Methods on the data axis: how gradients and weights travel between replicas."""
