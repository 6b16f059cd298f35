"""Which rank computes which part of a model: list scheduling with limited memory, and what runs the plan."""

from thinwire.placement.place import Placement, place
from thinwire.placement.runner import Placed

__all__ = ["Placed", "Placement", "place"]
