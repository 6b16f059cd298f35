"""Chooses and explains before anything runs: what each strategy would hold in memory and send on a cluster."""

from thinwire.planner.explain import Explained, explain
from thinwire.planner.options import ExplainConfig

__all__ = ["ExplainConfig", "Explained", "explain"]
