"""Runs pipelines: plans of `methods/pipeline` with modules, messages and gradients."""

from thinwire.hosts.pipeline.measured import measured
from thinwire.hosts.pipeline.runner import Runner

__all__ = ["Runner", "measured"]
