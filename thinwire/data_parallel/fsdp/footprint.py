"""What a rank holds and sends on FSDP2."""

from __future__ import annotations

import math
from collections import Counter
from typing import cast

from torch import nn

from thinwire.collectives import Topology
from thinwire.collectives.algorithms import gather_bytes, reduce_bytes
from thinwire.data_parallel.fsdp.strategies import OnFSDP, ShardingStrategy
from thinwire.data_parallel.interface import Footprint, agreement_sent, footprint
from thinwire.data_parallel.layers import layers_of

AGAIN = "weights_again"


@footprint.register
def fsdp_footprint(strategy: OnFSDP, model: nn.Module, topology: Topology, micro_batches: int) -> Footprint:
    """Weights are whole from forward to backward, or one module at a time; gradients accumulate whole."""
    chosen = cast(ShardingStrategy, strategy)
    world_size, matrix, vector = topology.world_size, chosen.matrix(), chosen.vector()
    modules = layers_of(model)
    inside = {param for module in modules for param in module.parameters()}
    rest = [param for param in model.parameters() if param not in inside]
    sent: Counter[tuple[str, str]] = Counter(agreement_sent(topology))
    whole = shard = largest = kept = 0
    for unit in [*(list(module.parameters()) for module in modules), rest]:
        unit_numel = 0
        for shape in [param.shape for param in unit if param.requires_grad]:
            wire, n = vector if len(shape) < 2 else matrix, -(-shape[0] // world_size) * math.prod(shape[1:])
            packet = wire.weights.packet_bytes(n)
            again = gather_bytes(topology, packet)
            if strategy.secondary and topology.num_nodes > 1:
                kept += topology.num_nodes * packet
                again["inter"] = 0
            # Accumulation keeps the weights whole until the last forward.
            for level, num_bytes in gather_bytes(topology, packet).items():
                sent["weights", level] += num_bytes
                sent[AGAIN, level] += again[level] * strategy.reshard_after_forward
            for level, num_bytes in reduce_bytes(topology, n, wire.intra, wire.inter).items():
                sent["gradients", level] += num_bytes
            unit_numel += n
        shard += 4 * unit_numel
        whole += 4 * unit_numel * world_size
        largest = max(largest, 4 * unit_numel * world_size)
    is_cut = strategy.reshard_after_forward and micro_batches == 1
    return Footprint(
        weights=shard if is_cut else whole + shard,
        gradients=shard if micro_batches == 1 else whole,
        optimizer=2 * shard,
        passing=2 * largest if is_cut else largest,
        sent=dict(sent),
        other={"secondary partition": kept} if kept else {},
    )
