"""Gives each method the host that runs it, each on its axis of one mesh."""

from __future__ import annotations

# A host registers itself for its kind of method.
import thinwire.hosts.ddp.optimizer
import thinwire.hosts.forward.optimizer
import thinwire.hosts.fsdp.optimizer
import thinwire.hosts.sharded.wrap
import thinwire.islands.library
import thinwire.islands.optimizer
import thinwire.islands.own_pace  # noqa: F401
from thinwire.compose.parallelized import parallelize
from thinwire.compose.pipelined import pipeline
from thinwire.compose.pipelined_model import PipelinedModel
from thinwire.compose.stage import Stage
from thinwire.hosts.interface import apply

__all__ = ["PipelinedModel", "Stage", "apply", "parallelize", "pipeline"]
