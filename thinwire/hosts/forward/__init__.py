"""Training without backward: losses along random directions that every rank draws for itself."""
