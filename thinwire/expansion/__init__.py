"""LEMON: turns a trained transformer into a wider and deeper one that computes the same."""
