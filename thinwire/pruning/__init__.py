"""MoE-Pruner and what it is compared with: weights of a trained model that go to zero at once, without training."""
