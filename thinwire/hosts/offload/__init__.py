"""Decides where the tensors of a sharded host lie, and moves them between disk and memory."""
