"""Islands: worlds of their own that exchange rarely, and may be lost and come back."""
