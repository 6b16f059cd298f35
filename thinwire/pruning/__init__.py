"""MoE-Pruner and its baselines: set weights of a trained model to zero at once, without training."""
