"""LEMON: a trained transformer becomes a wider and deeper one that computes the same."""

from thinwire.expansion.expand import Expanded, expand

__all__ = ["Expanded", "expand"]
