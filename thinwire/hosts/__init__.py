"""Hosts: hooks, and the order of a step. A host runs a method on a model and an optimizer, and knows no paper."""
