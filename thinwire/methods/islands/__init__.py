"""Methods of the island axis, one paper a file."""
