"""Third floor: one published method a file: frozen options, the arithmetic, and the plan of bytes and memory."""
