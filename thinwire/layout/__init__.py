"""Where each tensor lies in a flat buffer. Imports no communicator."""
