"""torch's DistributedDataParallel, with gradients averaged by a method."""
