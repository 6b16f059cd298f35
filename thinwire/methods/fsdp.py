"""Base of the methods on FSDP2; each method has a file in `data`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Protocol, cast

from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.collectives.gather import gather_bytes
from thinwire.collectives.reduce import reduce_bytes
from thinwire.layout.formats import Strategy
from thinwire.layout.layers import layers_of
from thinwire.methods.interface import (
    CUTS_TENSORS,
    WEIGHTS_COME_AND_GO,
    GatheredMethod,
    GradientMemory,
    Method,
    MethodPlan,
    agreement_sent,
)
from thinwire.optim import SHARDED

AGAIN = "weights_again"


class ShardingStrategy(GatheredMethod, Protocol):
    """A choice of codecs for FSDP2, and whether whole weights are dropped after forward."""

    reshard_after_forward: bool


class FSDPMethod(Method):
    """Base class of methods that choose codecs for FSDP2.

    Args:
        reshard_after_forward: drop whole weights after forward and gather them again in backward.
        secondary: see ZeroPP.
    """

    own_way: ClassVar[str] = "compress_fsdp"
    not_on_zero: ClassVar[str] = "belongs to torch's wrapper"
    optimizers: ClassVar[tuple[str, ...]] = SHARDED
    optimizers_reason: ClassVar[str] = CUTS_TENSORS
    shards_optimizer: ClassVar[bool] = True

    reshard_after_forward: bool = False
    secondary: bool = False

    @property
    def keeps_whole_weights(self) -> bool:
        """See Method."""
        return not self.reshard_after_forward

    def not_compiled(self, topology: Topology) -> str:
        """See Method."""
        return WEIGHTS_COME_AND_GO

    def gradient_memory(self, numels: Sequence[int]) -> GradientMemory | None:
        """State of one module's reductions, or None. numels: elements of a rank's part of each parameter."""
        return None

    @property
    def codecs(self: Strategy) -> tuple[Codec, ...]:
        """The codecs whose kernels are compiled before the workers start."""
        return (*self.matrix().codecs, *self.vector().codecs)

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """Weights are whole from forward to backward, or one module at a time. Gradients accumulate whole."""
        chosen = cast(ShardingStrategy, self)
        world_size, matrix, vector = topology.world_size, chosen.matrix(), chosen.vector()
        modules = layers_of(model)
        inside = {param for module in modules for param in module.parameters()}
        rest = [param for param in model.parameters() if param not in inside]
        sent: Counter[tuple[str, str]] = Counter(agreement_sent(topology))
        whole = shard = largest = kept = lost = 0
        for unit in [*(list(module.parameters()) for module in modules), rest]:
            unit_numel, numels = 0, list[int]()
            pieces: dict[str, tuple[int, ...]] = {}
            for shape in [param.shape for param in unit if param.requires_grad]:
                wire, n = vector if len(shape) < 2 else matrix, -(-shape[0] // world_size) * math.prod(shape[1:])
                packet = wire.weights.packet_bytes(n)
                again = gather_bytes(topology, packet)
                if self.secondary and topology.num_nodes > 1:
                    kept += topology.num_nodes * packet
                    again["inter"] = 0
                # Accumulation keeps the weights whole until the last forward.
                for level, num_bytes in gather_bytes(topology, packet).items():
                    sent["weights", level] += num_bytes
                    sent[AGAIN, level] += again[level] * self.reshard_after_forward
                for level, num_bytes in reduce_bytes(topology, n, wire.intra, wire.inter).items():
                    sent["gradients", level] += num_bytes
                unit_numel += n
                numels.append(n)
                pieces |= wire.lossy_pieces(topology)
            if memory := self.gradient_memory(numels):
                lost += sum(map(math.prod, pieces.values())) * memory.piece_bytes
            shard += 4 * unit_numel
            whole += 4 * unit_numel * world_size
            largest = max(largest, 4 * unit_numel * world_size)
        is_cut = self.reshard_after_forward and micro_batches == 1
        held = {"secondary partition": kept, "error feedback": lost}
        return MethodPlan(
            weights=shard if is_cut else whole + shard,
            gradients=shard if micro_batches == 1 else whole,
            optimizer=2 * shard,
            passing=2 * largest if is_cut else largest,
            sent=dict(sent),
            other={name: size for name, size in held.items() if size},
        )
