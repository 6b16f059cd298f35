"""The state that a method keeps between steps, and what every host does with it."""
