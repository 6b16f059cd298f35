"""Islands: groups of ranks that train by themselves, exchange rarely, and may be lost and come back."""
