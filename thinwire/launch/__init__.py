"""Starts the workers of one machine, forwards signals and messages, and reports why a run has failed."""
