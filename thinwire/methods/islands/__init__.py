"""Methods on the island axis: what islands that exchange rarely send, and how the result is taken."""
