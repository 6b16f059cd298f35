"""The strategies that run on FSDP2."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

from torch import nn

from thinwire.codecs import (
    Cast,
    Codec,
    Hadamard,
    Identity,
    Integer,
)
from thinwire.collectives import Topology
from thinwire.collectives.gather import gather_bytes
from thinwire.collectives.reduce import reduce_bytes
from thinwire.errors import ConfigError, nearest
from thinwire.layout.formats import Strategy, WireFormat
from thinwire.layout.layers import layers_of
from thinwire.methods.interface import CUTS_TENSORS, Plan, agreement_sent
from thinwire.methods.options import check_types
from thinwire.optim import ELEMENTWISE

AGAIN = "weights_again"
WIRES: dict[str, Codec] = {"fp32": Identity(), "bf16": Cast("bf16")}
WIDTHS = {"int8": 8, "int6": 6, "int4": 4, "int3": 3, "int2": 2}


class ShardingStrategy(Strategy, Protocol):
    """A choice of codecs for FSDP2, and whether whole weights are dropped after forward."""

    reshard_after_forward: bool


class FSDPMethod:
    """What makes a choice of codecs a Method on FSDP2.

    reshard_after_forward: drop whole weights after forward and gather them again in backward. secondary, loco_beta,
    loco_reset: see ZeroPP.
    """

    settled_after: ClassVar[int] = 0
    own_way: ClassVar[str] = "compress_fsdp"
    not_on_zero: ClassVar[str] = "belongs to torch's wrapper"
    optimizers: ClassVar[tuple[str, ...]] = ELEMENTWISE
    optimizers_reason: ClassVar[str] = CUTS_TENSORS

    reshard_after_forward: bool = False
    secondary: bool = False

    @property
    def codecs(self: Strategy) -> tuple[Codec, ...]:
        """Whose kernels are compiled before the workers start."""
        return (*self.matrix().codecs, *self.vector().codecs)

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> Plan:
        """Weights are whole from forward to backward, or one module at a time; gradients accumulate whole."""
        chosen = cast(ShardingStrategy, self)
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
            shard += 4 * unit_numel
            whole += 4 * unit_numel * world_size
            largest = max(largest, 4 * unit_numel * world_size)
        is_cut = self.reshard_after_forward and micro_batches == 1
        return Plan(
            weights=shard if is_cut else whole + shard,
            gradients=shard if micro_batches == 1 else whole,
            optimizer=2 * shard,
            passing=2 * largest if is_cut else largest,
            sent=dict(sent),
            other={"secondary partition": kept} if kept else {},
        )


@dataclass(frozen=True)
class FSDP(FSDPMethod):
    """torch's fully_shard over thinwire's collectives: one all_gather and one reduce_scatter of everything per step.

    wire: "fp32", or "bf16": weights and gradients travel as bf16, masters and sums stay fp32. Shards are kept whole
    between forward and backward (reshard_after_forward=False), since on a slow link a second gather costs more than the
    memory. Sends 8 (P-1)/P bytes per parameter and step, or 4.

    Raises ConfigError for another wire. Source: Zhao et al., "PyTorch FSDP", VLDB 2023.
    """

    wire: str = "fp32"

    def __post_init__(self) -> None:
        check_types(self)
        if self.wire not in WIRES:
            raise ConfigError(f"wire {self.wire!r} of fsdp: must be fp32 or bf16{nearest(self.wire, WIRES)}")

    @property
    def name(self) -> str:
        """What `--strategy` calls it."""
        return "fsdp" if self.wire == "fp32" else f"fsdp-{self.wire}"

    def matrix(self) -> WireFormat:
        return WireFormat(WIRES[self.wire], False, WIRES[self.wire], WIRES[self.wire])

    vector = matrix


@dataclass(frozen=True)
class ZeroPP(FSDPMethod):
    """ZeRO++: quantised weights, weights kept once per node, quantised gradients in two hops with the exact mean.

    weights: "int8", "int6", "int4", "bf16" or "fp32", in groups of `weight_group`. gradients: the same choice for the
    hop between nodes, intra_gradients for the hop inside a node ("same": as between), in groups of `gradient_group`,
    rotated in rows of `hadamard` first (0: not), with `rounding` "nearest" or "stochastic". vectors: norms, biases and
    other parameters of one dimension, both ways: "bf16", "fp32" or "int8" in groups of 64; they are few, and errors in
    them weigh more. secondary: keep what a gather brought from other nodes, so that backward and unchanged weights
    need nothing from outside. loco: error feedback of the gradients, with the weight `loco_beta` of the old error and
    a fresh start after `loco_reset` steps. reshard_after_forward: in the trainer only; elsewhere fully_shard was told.

    Raises ConfigError for another width and for values that the codecs refuse.
    Source: ZeRO++ (ICLR 2024); LoCo (2024) for the error feedback.
    """

    name: ClassVar[str] = "zeropp"

    weights: str = "int8"
    weight_group: int = 2048
    gradients: str = "int4"
    intra_gradients: str = "same"
    gradient_group: int = 128
    hadamard: int = 0
    rounding: str = "nearest"
    vectors: str = "bf16"
    secondary: bool = True
    loco: bool = False
    loco_beta: float = 0.8
    loco_reset: int = 1024
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        if not 0.0 <= self.loco_beta < 1.0:
            raise ConfigError(f"zeropp loco_beta {self.loco_beta}: must be at least 0 and below 1; the paper's is 0.8")
        if self.loco_reset < 1:
            raise ConfigError(f"zeropp loco_reset {self.loco_reset}: must be at least 1; the paper's is 1024")
        self.matrix()
        self.vector()

    def matrix(self) -> WireFormat:
        intra = self.gradients if self.intra_gradients == "same" else self.intra_gradients
        return WireFormat(
            width("weights", self.weights, self.weight_group, "nearest"),
            differences=False,
            intra=self._gradient("intra_gradients", intra),
            inter=self._gradient("gradients", self.gradients),
        )

    def vector(self) -> WireFormat:
        codec = width("vectors", self.vectors, 64, "nearest")
        return WireFormat(codec, differences=False, intra=codec, inter=codec)

    def _gradient(self, option: str, name: str) -> Codec:
        codec = width(option, name, self.gradient_group, self.rounding)
        return Hadamard(codec, self.hadamard) if self.hadamard and isinstance(codec, Integer) else codec


def width(option: str, name: str, group: int, rounding: str) -> Codec:
    """The codec called `name`; raises ConfigError that names the option."""
    if name in WIRES:
        return WIRES[name]
    if name not in WIDTHS:
        raise ConfigError(f"zeropp {option} {name!r}: no such width{nearest(name, [*WIDTHS, *WIRES])}")
    return Integer(WIDTHS[name], group, rounding)
