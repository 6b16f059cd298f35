"""Tensors to flat spans and back. No communicator."""
