"""What a plan counts of an optimizer other than AdamW, and the ways to train that it can't take."""

from __future__ import annotations

from torch import nn

from thinwire.collectives import Topology
from thinwire.hosts.sums import looking_across
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.sums import planned_with
from thinwire.optim import JOINT, MESHED, WHOLE, SummingOptimizer
from thinwire.planner.candidates import Candidate
from thinwire.run.optimizer import name_of, optimizer_over

ADAMW = "adamw"
# Optimizers whose state and messages are counted.
COUNTED = (ADAMW, "muon", "dion", "apollo", "apollo-mini", "mfac")


def counted_by(strategy: Method, optimizer: str | None) -> str:
    """The optimizer whose state a strategy's plan counts: the one that is asked for, or the strategy's own."""
    return optimizer or strategy.optimizers[0]


def why_not_by(strategy: Method, optimizer: str | None) -> str:
    """Why a strategy's plan can't be made for an optimizer, to follow its name; empty: it can."""
    name = name_of(counted_by(strategy, optimizer))
    if name not in strategy.optimizers:
        return strategy.optimizers_reason
    counted = [each for each in COUNTED if each in strategy.optimizers] or [strategy.optimizers[0]]
    if name in counted or name == strategy.optimizers[0]:
        return ""
    return f"trains by it too, but its state is not counted; counted are {', '.join(counted)}"


def why_not_stepped(optimizer: str, way: Candidate) -> str:
    """Why an optimizer can't step what a rank has of the model in this way to train; empty: it can."""
    name = name_of(optimizer)
    if way.outer and name != ADAMW:
        return f"islands are planned for {ADAMW} alone"
    if way.tensor > 1 and name in WHOLE and name not in MESHED:
        return "it needs whole tensors"
    return "it looks across all parameters" if name in JOINT and way.stages * way.experts > 1 else ""


def by_optimizer(plan: MethodPlan, strategy: Method, model: nn.Module, optimizer: str, grid: Topology) -> MethodPlan:
    """The plan with the state and the messages of an optimizer in the place of AdamW's. Raises ConfigError.

    An optimizer of islands steps inside each of them, which is a node of the grid.
    """
    if isinstance(strategy, IslandsMethod):
        strategy, grid = strategy.inner, Topology(1, grid.local_size)
    inner = optimizer_over(optimizer, model, lr=0.0, weight_decay=0.0, seed=0)
    assert isinstance(inner, SummingOptimizer)
    across = looking_across(inner, dict(model.named_parameters()))
    return planned_with(plan, inner, strategy.cuts(model, grid, across), across, grid)
