"""What a rank holds and sends under three-level sharding."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from thinwire.collectives import Topology
from thinwire.data_parallel.frontier.layout import lay_out, sent_by
from thinwire.data_parallel.frontier.strategies import Frontier
from thinwire.data_parallel.interface import Footprint, agreement_sent, footprint
from thinwire.data_parallel.zero.layout import Seat

WORD_BYTES = 24


@footprint.register
def frontier_footprint(strategy: Frontier, model: nn.Module, topology: Topology, micro_batches: int) -> Footprint:
    """4 N/s1 of weights, 4 N/s2 of gradient sums, 12 N/P of masters and moments, and whole units passing by."""
    levels = strategy.levels(topology)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    units = lay_out(model, trained, strategy, cast(Any, Seat(topology)), levels)
    numel = sum(unit.numel for unit in units)
    # A parameter without a gradient in this step is one bit, in a message of its own.
    sent = agreement_sent(topology, WORD_BYTES + -(-len(trained) // 8))
    staying = sum(unit.numel for unit in units if unit.stays)
    # One computes and the next one comes.
    others = sorted((unit.numel for unit in units if not unit.stays), reverse=True)[:2]
    weights_passing = staying + sum(others) if levels.weights_over > 1 else 0
    gradients_passing = staying + sum(others[:1])
    mean = numel // topology.world_size if levels.num_blocks > 1 else 0
    return Footprint(
        weights=4 * numel // levels.weights_over,
        gradients=4 * (numel // levels.gradients_over + mean),
        optimizer=12 * numel // topology.world_size,
        passing=4 * (weights_passing + gradients_passing),
        sent=sent | sent_by(units, micro_batches),
    )
