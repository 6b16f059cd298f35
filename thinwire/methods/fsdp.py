"""Base of the methods on FSDP2; each method has a file in `data`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import ClassVar, Protocol, cast

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.collectives.gather import gather_bytes
from thinwire.collectives.reduce import reduce_bytes
from thinwire.layout.formats import Strategy, WireFormat
from thinwire.layout.layers import layers_of
from thinwire.methods import schedule
from thinwire.methods.interface import (
    CUTS_TENSORS,
    WEIGHTS_COME_AND_GO,
    Cuts,
    GatheredMethod,
    GradientMemory,
    Method,
    MethodPlan,
    agreement_sent,
    trained_shapes,
)
from thinwire.methods.schedule import BACKWARD, END, FORWARD, PlannedExchange, PlannedExchanges, plain, shares_of
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
    no_local_gradient: ClassVar[str] = "sums the gradients of a layer over the ranks as soon as backward leaves it"

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

    def _units(self, model: nn.Module) -> list[dict[str, nn.Parameter]]:
        """The parameters of each layer, and of what lies in none, by name."""
        layers = layers_of(model)
        number = {param: at for at, module in enumerate(layers) for param in module.parameters()}
        units: list[dict[str, nn.Parameter]] = [{} for _ in range(len(layers) + 1)]
        for name, param in model.named_parameters():
            units[number.get(param, len(layers))][name] = param
        return units

    def _sent(self, topology: Topology, num_elements: int, wire: WireFormat) -> Counter[tuple[str, str]]:
        """Bytes of one parameter of which a rank holds `num_elements` elements."""
        sent: Counter[tuple[str, str]] = Counter()
        gathered = gather_bytes(topology, wire.weights.packet_bytes(num_elements))
        again = {**gathered, "inter": 0} if self.secondary and topology.num_nodes > 1 else gathered
        # Accumulation keeps the weights whole until the last forward.
        for level, num_bytes in gathered.items():
            sent["weights", level] += num_bytes
            sent[AGAIN, level] += again[level] * self.reshard_after_forward
        for level, num_bytes in reduce_bytes(topology, num_elements, wire.intra, wire.inter).items():
            sent["gradients", level] += num_bytes
        return sent

    def exchanges(self, model: nn.Module, topology: Topology, micro_batches: int) -> PlannedExchanges:
        """Weights come a layer ahead of forward, and before backward if they were dropped; gradients leave after it."""
        chosen = cast(ShardingStrategy, self)
        when = {"weights": FORWARD, AGAIN: schedule.AGAIN, "gradients": BACKWARD}
        units, found = self._units(model), list[PlannedExchange]()
        for number, unit in enumerate(units):
            sent: Counter[tuple[str, str]] = Counter()
            for shape in [param.shape for param in unit.values() if param.requires_grad]:
                wire = chosen.vector() if len(shape) < 2 else chosen.matrix()
                sent += self._sent(topology, -(-shape[0] // topology.world_size) * math.prod(shape[1:]), wire)
            for operation, at in when.items():
                own = {key: num for key, num in sent.items() if key[0] == operation}
                found += plain(own, at, unit=number)
        words = plain(agreement_sent(topology), END)
        return PlannedExchanges(shares_of(model, units), (*found, *words), ahead=1)

    def cuts(self, model: nn.Module, topology: Topology, names: Collection[str]) -> Cuts:
        """See Method."""
        shapes = {name: shape for name, shape in trained_shapes(model).items() if name in names}
        return {name: (shape, cut_by_rows(shape, topology.world_size)) for name, shape in shapes.items()}

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """Weights are whole from forward to backward, or one module at a time. Gradients accumulate whole."""
        chosen = cast(ShardingStrategy, self)
        world_size, matrix, vector = topology.world_size, chosen.matrix(), chosen.vector()
        sent: Counter[tuple[str, str]] = Counter(agreement_sent(topology))
        whole = shard = largest = kept = lost = 0
        for unit in self._units(model):
            unit_numel, numels = 0, list[int]()
            pieces: dict[str, tuple[int, ...]] = {}
            for shape in [param.shape for param in unit.values() if param.requires_grad]:
                wire, n = vector if len(shape) < 2 else matrix, -(-shape[0] // world_size) * math.prod(shape[1:])
                packet = wire.weights.packet_bytes(n)
                if self.secondary and topology.num_nodes > 1:
                    kept += topology.num_nodes * packet
                sent.update(self._sent(topology, n, wire))
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


def cut_by_rows(shape: torch.Size, world_size: int) -> list[tuple[int, int]]:
    """The elements [first, last) of each rank: FSDP2 cuts dimension 0 into equal parts, the last smaller or empty."""
    rows, row = -(-shape[0] // world_size), shape[1:].numel()
    ends = [min(rank * rows, shape[0]) * row for rank in range(world_size + 1)]
    return list(itertools.pairwise(ends))
