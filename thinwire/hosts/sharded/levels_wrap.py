"""Turn a model and its optimizer into a pair that is sharded on three levels."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import nn

from thinwire.collectives import Communicator
from thinwire.hosts.interface import ParallelOptimizer, RankOptions, apply, without_axis
from thinwire.hosts.sharded.levels_optimizer import FrontierOptimizer
from thinwire.layout.levels import Levels
from thinwire.layout.units import Unit, lay_out
from thinwire.methods.data.frontier import Frontier
from thinwire.state.elementwise import check_elementwise
from thinwire.state.replicas import Row, same_start, trained_parameters


def wrap_frontier(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Frontier,
    *,
    local_size: int | None,
    seed: int,
    timeout_s: float,
    checked: bool,
    overlap: bool,
) -> tuple[nn.Module, FrontierOptimizer]:
    """Shard model and optimizer in place; a collective over the default group.

    Raises ConfigError for a model and an optimizer that do not fit each other, for an optimizer that looks across the
    elements of a tensor, and for levels that do not fit the grid.
    """
    trained = trained_parameters(model, optimizer)
    check_elementwise(optimizer)
    comm = Communicator(local_size=local_size, timeout_s=timeout_s, checked=checked)
    levels = strategy.levels(comm.topology)
    start = same_start(model, comm)
    units = lay_out(model, trained, strategy, comm, levels)
    for unit in units:
        for part in unit.parts:
            part.allocate()
    overlapped = ("overlap of weights with forward", "on" if overlap else "off", "")
    rows = [*describe(strategy, levels, units), overlapped, start]
    sharded = FrontierOptimizer(model, optimizer, comm, units, levels, overlap=overlap, seed=seed, rows=rows)
    return model, sharded


def describe(strategy: Frontier, levels: Levels, units: list[Unit]) -> list[Row]:
    """Rows of (asked for, in effect, why)."""
    wire, world_size = strategy.matrix(), levels.topology.world_size
    near, wide = levels.weights_over, levels.gradients_over
    why_near = "stated" if strategy.weights_over else "2 where nodes have an even number of ranks, else 1"
    why_wide = "stated" if strategy.gradients_over else "by default a node"
    rows: list[Row] = [
        ("strategy frontier", "frontier", "masters and the optimizer's state over all ranks"),
        ("weights cut over", f"each {near} rank(s)", why_near),
        ("gradients cut over", f"each {wide} rank(s)", why_wide),
        ("units", f"{len(units)}", "children of ModuleLists, and the root for the rest: whole one by one"),
    ]
    block = levels.topology.among(levels.block(0))
    column = levels.topology.among(levels.column(0))
    hops = {
        f"weights {strategy.weights}": (wire.shards, near > 1, "weights are whole on every rank"),
        f"intra {strategy.intra}": (wire.intra, max(block.local_size, column.local_size) > 1, "no hop inside nodes"),
        f"inter {strategy.inter}": (wire.inter, max(block.num_nodes, column.num_nodes) > 1, "there is one node"),
        f"refresh {strategy.refresh}": (wire.weights, near < world_size, "every rank's masters are of its own weights"),
    }
    for asked, (codec, travels, why_not) in hops.items():
        why = f"{codec.bits_per_element:.4g} bits an element" if travels else why_not
        rows.append((asked, str(codec) if travels else "no effect", why))
    if strategy.differences:
        effect = "on" if wire.differences else "no effect"
        rows.append(("differences", effect, "" if wire.differences else "fp32 loses nothing"))
    if strategy.hadamard and not (wire.intra.rotation or wire.inter.rotation):
        rows.append((f"hadamard {strategy.hadamard}", "no effect", "gradients travel as floats"))
    padded, true = sum(unit.numel for unit in units), sum(s.param.numel() for unit in units for s in unit.slots)
    rows.append(("norms and biases", "fp32", ""))
    rows.append(("padding", f"{padded / max(true, 1) - 1:.2%}", f"{true:,} parameters"))
    return rows


@apply.register
def _apply_frontier(
    method: Frontier,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    overlap: bool,
    **options: Unpack[RankOptions],
) -> tuple[nn.Module, ParallelOptimizer]:
    """See hosts.interface."""
    return wrap_frontier(model, optimizer, method, overlap=overlap, **without_axis(method, options))
