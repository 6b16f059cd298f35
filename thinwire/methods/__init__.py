"""Methods: one published method per file, with frozen options, its arithmetic, and its plan of bytes and memory."""
