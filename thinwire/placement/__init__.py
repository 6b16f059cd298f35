"""Decides which rank computes which part of a model, by list scheduling with limited memory, and runs the plan."""

from thinwire.placement.place import Placement, place
from thinwire.placement.runner import Placed

__all__ = ["Placed", "Placement", "place"]
