"""Checkpoints: those of other programs, and folders of safetensors."""
