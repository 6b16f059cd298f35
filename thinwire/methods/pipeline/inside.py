"""Which methods average a stage's gradients over its replicas, and why others can't."""

from __future__ import annotations

from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.fsdp import FSDPMethod
from thinwire.methods.interface import Method
from thinwire.methods.outer.base import Connected
from thinwire.methods.pipeline.options import Pipeline
from thinwire.methods.pipeline.recover import NONE
from thinwire.methods.sharded import ShardedMethod

ONCE_A_MICRO_BATCH = "would gather a stage's weights anew for each micro-batch"


def check_inside(method: Method | Connected, num_replicas: int) -> None:
    """Raise ConfigError for a method that can't train the stages of a pipeline."""
    if reason := why_not_inside(method, num_replicas):
        name = method.method.name if isinstance(method, Connected) else method.name
        raise ConfigError(
            f"{name} can't train the stages of a pipeline: it {reason}; nearest that can: zero, sdp4bit or ddp"
        )


def check_recovers(options: Pipeline, method: Method | Connected, num_replicas: int) -> None:
    """Raise ConfigError for a method whose replicas of a stage can't go on without a lost one."""
    if options.recover != NONE and num_replicas > 1 and isinstance(method, DDPMethod):
        raise ConfigError(
            f"recover {options.recover!r} with {num_replicas} replicas of each stage by {method.name}: each has the "
            "whole state of the optimizer, and a lost one would begin with another; nearest: zero or sdp4bit"
        )


def why_not_inside(method: Method | Connected, num_replicas: int) -> str:
    """Why a method can't, to follow its name; empty: it can. num_replicas: of each stage."""
    if isinstance(method, FSDPMethod):
        return ONCE_A_MICRO_BATCH
    if isinstance(method, ShardedMethod) and method.levels(Topology(num_replicas, 1)).weights_over > 1:
        return ONCE_A_MICRO_BATCH
    if isinstance(method, ShardedMethod | DDPMethod):
        return method.not_on_mesh
    return "needs the whole model on every rank"
