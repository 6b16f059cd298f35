"""Starts the workers of one machine, passes signals and messages on, and says why a run has failed."""
