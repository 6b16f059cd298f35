"""Fourth floor: hooks and order. A host runs a method on a model and an optimizer, and knows no paper."""
