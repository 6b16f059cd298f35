"""The trainer behind `thinwire train`: a thin example of the library, and everything else that a run needs."""
