"""What a rank holds and sends on FSDP2."""

from __future__ import annotations

import math

from torch import nn

from thinwire.collectives import Topology
from thinwire.collectives.algorithms import gather_bytes, reduce_bytes
from thinwire.data_parallel.fsdp.strategies import FSDP, WIRES
from thinwire.data_parallel.interface import Footprint, agreement_sent, footprint


@footprint.register
def fsdp_footprint(strategy: FSDP, model: nn.Module, topology: Topology, micro_batches: int) -> Footprint:
    """Weights are whole from forward to backward; gradients of all micro-batches but the last accumulate whole."""
    # It imports torch's FSDP2, which a process that trains without need not load.
    from thinwire.data_parallel.fsdp.optimizer import wrap_modules

    codec, world_size = WIRES[strategy.wire], topology.world_size
    modules = wrap_modules(model)
    inside = {param for module in modules for param in module.parameters()}
    rest = [param for param in model.parameters() if param not in inside]
    units = [*(list(module.parameters()) for module in modules), rest]
    sent: dict[tuple[str, str], int] = {}
    whole = shard = largest = 0
    for unit in units:
        shapes = [param.shape for param in unit if param.requires_grad]
        rows = sum(-(-shape[0] // world_size) * math.prod(shape[1:]) for shape in shapes)
        levels = {
            "weights": gather_bytes(topology, codec.packet_bytes(rows)),
            "gradients": reduce_bytes(topology, rows, codec, codec),
        }
        for operation, on_level in levels.items():
            for level, num_bytes in on_level.items():
                sent[operation, level] = sent.get((operation, level), 0) + num_bytes
        whole, shard, largest = whole + 4 * rows * world_size, shard + 4 * rows, max(largest, 4 * rows * world_size)
    return Footprint(
        weights=whole + shard,
        gradients=shard if micro_batches == 1 else whole,
        optimizer=2 * shard,
        passing=largest,
        sent=sent | agreement_sent(topology),
    )
