"""Compressed communication in the training loops of other libraries, in one to three lines."""

from thinwire.adapters.attach import attach

__all__ = ["attach"]
