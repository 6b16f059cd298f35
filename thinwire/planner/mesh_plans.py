"""The plan of a strategy on the axes of a mesh."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from thinwire.collectives import Topology
from thinwire.collectives.gather import gather_bytes
from thinwire.hosts.ranks import along
from thinwire.layout.mesh import MeshShape
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.pipeline.across import ranks_across
from thinwire.methods.tables import by_tokens
from thinwire.options import PIPELINE
from thinwire.planner.asked import tokens_of
from thinwire.planner.experts import expert_plan
from thinwire.planner.optimizers import ADAMW, COUNTED, by_optimizer, counted_by
from thinwire.planner.options import AUTO, ExplainConfig
from thinwire.run.optimizer import name_of


def plan_on(
    strategy: Method, model: nn.Module, whole: nn.Module, config: ExplainConfig, shape: MeshShape
) -> MethodPlan:
    """The plan of a strategy on the data axis of a mesh; the ranks' word on a step goes to all of the mesh.

    model: what a rank has of the `whole` one, in whose parameters the word has room.
    """
    if shape.expert > 1:
        return expert_plan(strategy, whole, config, shape)
    grid = Topology(config.nodes, config.local_size)
    if shape.tensor * shape.pipeline == 1:
        plan, _ = by_tokens(strategy.plan(model, grid, config.passes), strategy, model, grid, tokens_of(config))
        return with_optimizer(plan, strategy, model, config, grid)
    if isinstance(strategy, IslandsMethod):
        plan = strategy.plan_around(model, whole, grid, config.passes, shape.tensor)
        joined = Topology(1, grid.local_size // (shape.tensor * shape.pipeline))
        return with_optimizer(plan, strategy, model, config, joined)
    plan = strategy.plan(model, replicas_on(config, shape), config.passes)
    num_told = max(2, shape.sizes["data"]) - 1
    word = strategy.plan(whole, Topology(num_told + 1, 1), 1).sent["all_gather_exact", "inter"] // num_told
    words = {("all_gather_exact", level): sent for level, sent in gather_bytes(grid, word).items()}
    return replace(plan, sent={**plan.sent, **words})


def with_optimizer(
    plan: MethodPlan, strategy: Method, model: nn.Module, config: ExplainConfig, grid: Topology
) -> MethodPlan:
    """The plan with the state of the optimizer that is asked for, or of the strategy's own, if that is counted."""
    optimizer = counted_by(strategy, config.optimizer)
    is_other = name_of(optimizer) in COUNTED and name_of(optimizer) != ADAMW
    return by_optimizer(plan, strategy, model, optimizer, grid) if is_other else plan


def replicas_on(config: ExplainConfig, shape: MeshShape) -> Topology:
    """The grid of the ranks of one stage that a strategy joins."""
    grid = Topology(config.nodes, config.local_size)
    if shape.tensor * shape.pipeline == 1:
        return grid
    across = config.tables.get(PIPELINE, {}).get("across", AUTO)
    first = ranks_across(across, grid.world_size, shape.pipeline, shape.tensor)[0, :, 0].tolist()
    on_node = along(grid, first)
    return Topology(len(first) // on_node, on_node)
