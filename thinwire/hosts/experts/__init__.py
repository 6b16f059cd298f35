"""Runs mixtures whose experts lie on several ranks: the rows' messages, the model's seam, the parts of parameters."""

from thinwire.hosts.experts.parallel import ExpertRanks, expert_parallel

__all__ = ["ExpertRanks", "expert_parallel"]
