"""Third floor: compressed communication for the training loops of others, in one to three lines."""

from thinwire.adapters.attach import attach

__all__ = ["attach"]
