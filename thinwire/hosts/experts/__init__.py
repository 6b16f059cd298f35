"""Runs mixtures whose experts lie on several ranks: messages of rows, the model's interface, parts of parameters."""

from thinwire.hosts.experts.parallel import ExpertRanks, expert_parallel

__all__ = ["ExpertRanks", "expert_parallel"]
