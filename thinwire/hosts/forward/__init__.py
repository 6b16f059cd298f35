"""Training without backward: losses along directions that every rank draws for itself."""
