"""Which methods average a stage's gradients over its replicas, and why others can't."""

from __future__ import annotations

from collections.abc import Mapping

from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.fsdp import FSDPMethod
from thinwire.methods.interface import Method
from thinwire.methods.outer.base import Connected, IslandsMethod
from thinwire.methods.pipeline.cut import SPREAD
from thinwire.methods.pipeline.options import Pipeline
from thinwire.methods.pipeline.recover import NONE
from thinwire.methods.sharded import ShardedMethod

CLIMBS = "takes the gradient a second time uphill, which stages do not: leave ascent out"
ONCE_A_MICRO_BATCH = "would gather a stage's weights anew for each micro-batch"


def check_inside(method: Method | Connected, num_replicas: int) -> None:
    """Raise ConfigError for a method that can't train the stages of a pipeline."""
    if reason := why_not_inside(method, num_replicas):
        name = method.method.name if isinstance(method, Connected) else method.name
        raise ConfigError(
            f"{name} can't train the stages of a pipeline: it {reason}; nearest that can: zero, sdp4bit or ddp"
        )


def check_recovers(options: Pipeline, method: Method | Connected, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if a run can't continue without a lost stage. sizes: of the mesh."""
    num_replicas, tensor = sizes.get("data", 1), sizes.get("tensor", 1)
    if options.recover != NONE and isinstance(method, IslandsMethod | Connected):
        raise ConfigError(
            f"recover {options.recover!r} inside of islands: an island that fails is started again, and takes the "
            f"state of the others; nearest: recover {NONE!r}"
        )
    if options.recover != NONE and tensor > 1:
        raise ConfigError(
            f"recover {options.recover!r} beside a tensor axis of {tensor}: a neighbour has other parts of its layers' "
            f"matrices than a lost rank; nearest: recover {NONE!r}"
        )
    if options.recover != NONE and num_replicas > 1 and isinstance(method, DDPMethod):
        raise ConfigError(
            f"recover {options.recover!r} with {num_replicas} replicas of each stage by {method.name}: each has the "
            "whole state of the optimizer, and a lost one would begin with another; nearest: zero or sdp4bit"
        )


def check_spread(options: Pipeline, method: Method | Connected | None, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if the vocabulary's rows can't be spread over all stages. sizes: of the mesh."""
    tensor, near = sizes.get("tensor", 1), f"; nearest: head 'last', or {SPREAD!r} with pipeline and data alone"
    if options.head == SPREAD and isinstance(method, IslandsMethod | Connected):
        raise ConfigError(
            f"head {SPREAD!r} inside of islands: they exchange whole weights, and no stage has these{near}"
        )
    if options.head == SPREAD and tensor > 1:
        raise ConfigError(f"head {SPREAD!r} beside a tensor axis of {tensor}: not supported{near}")


def why_not_inside(method: Method | Connected, num_replicas: int) -> str:
    """Why a method can't train stages, to follow its name; empty: it can. num_replicas: of each stage."""
    if isinstance(method, Connected):
        method = method.method
    if isinstance(method, IslandsMethod):
        return CLIMBS if method.climb is not None else method.of_inner(why_not_inside(method.inner, num_replicas))
    if isinstance(method, FSDPMethod):
        return ONCE_A_MICRO_BATCH
    if isinstance(method, ShardedMethod) and method.levels(Topology(num_replicas, 1)).weights_over > 1:
        return ONCE_A_MICRO_BATCH
    if isinstance(method, ShardedMethod | DDPMethod):
        return method.not_on_mesh
    return "needs the whole model on every rank"
