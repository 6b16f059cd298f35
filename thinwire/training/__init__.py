"""The trainer behind `thinwire train`: a thin example of the library, and what a run needs around it."""
