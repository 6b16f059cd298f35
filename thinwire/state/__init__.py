"""What a method remembers, and what every host does with it."""
