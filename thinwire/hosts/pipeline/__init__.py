"""Runs pipelines: plans of `methods/pipeline` with modules, messages and gradients."""

from thinwire.hosts.pipeline.measured import measured
from thinwire.hosts.pipeline.runner import Runner
from thinwire.hosts.pipeline.tied import TiedWeights

__all__ = ["Runner", "TiedWeights", "measured"]
