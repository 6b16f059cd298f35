"""LEMON: a trained transformer becomes a wider and deeper one that computes the same."""
