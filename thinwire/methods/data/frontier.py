"""Three-level sharding: weights over a few near ranks, gradients over a node, the optimizer over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import nn

from thinwire.codecs import (
    Cast,
    Codec,
    Hadamard,
    Identity,
    Integer,
)
from thinwire.collectives import Topology
from thinwire.errors import ConfigError, nearest
from thinwire.layout.buckets import Seat
from thinwire.layout.formats import LevelFormat
from thinwire.layout.levels import Levels, levels_on
from thinwire.layout.units import lay_out, sent_by
from thinwire.methods.interface import CUTS_TENSORS, Plan, agreement_sent
from thinwire.methods.options import check_types
from thinwire.optim import ELEMENTWISE

# Short groups: parameters are padded to them, and every shard holds whole ones. With bf16 scales, 64 gradients cost
# what 128 do with fp32 scales, and lose less.
WEIGHT_GROUP, GRADIENT_GROUP = 256, 64
WIDTHS = {
    "weights": ("fp32", "bf16", "int8"),
    "intra": ("fp32", "bf16", "int8", "int4"),
    "inter": ("fp32", "bf16", "int8", "int4"),
    "refresh": ("fp32", "bf16", "int8", "int4"),
}
PLAIN: dict[str, Codec] = {"fp32": Identity(), "bf16": Cast("bf16")}


@dataclass(frozen=True)
class Frontier:
    """Weights cut over s1 near ranks, gradients over s2, masters and the optimizer's state over all P; s1 | s2 | P.

    weights_over, gradients_over: s1 and s2; by default 2 where nodes have an even number of ranks, else 1, and the
    ranks of a node. weights: "fp32", "bf16" or "int8", the gather of a module's weights before its forward and its
    backward. intra: "fp32", "bf16", "int8" or "int4", gradients inside a node, summed there after every micro-batch;
    inter: between nodes, once a step. hadamard: block of the rotation around int8 and int4 gradients, 0 for none.
    refresh: "fp32", "bf16", "int8" or "int4", the updated weights on their way from the masters, once a step;
    differences: it carries master - weight instead of the master, so that what is lost comes back in the next step.
    Norms and biases travel in fp32.

    Raises ConfigError for other values, and for int4 without differences.
    Source: "Scaling Large Language Model Training on Frontier with Low-Bandwidth Partitioning", 2025; weight
    differences: SDP4Bit, NeurIPS 2024.
    """

    name: ClassVar[str] = "frontier"
    settled_after: ClassVar[int] = 0
    optimizers: ClassVar[tuple[str, ...]] = ELEMENTWISE
    optimizers_reason: ClassVar[str] = CUTS_TENSORS

    weights_over: int | None = None
    gradients_over: int | None = None
    weights: str = "int8"
    intra: str = "int8"
    inter: str = "int4"
    hadamard: int = 32
    refresh: str = "int8"
    differences: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        for option, widths in WIDTHS.items():
            value = getattr(self, option)
            if value not in widths:
                listed = ", ".join(widths[:-1]) + f" or {widths[-1]}"
                raise ConfigError(f"{option} {value!r} of frontier: must be {listed}{nearest(str(value), widths)}")
        for option in ("weights_over", "gradients_over"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(f"{option} {value} of frontier: must be at least 1; nearest: 1")
        if self.refresh == "int4" and not self.differences:
            raise ConfigError(
                "refresh 'int4' of frontier without differences would lose all small updates: set differences, or "
                "refresh to 'int8'"
            )
        self.matrix()

    def matrix(self) -> LevelFormat:
        """For parameters of two and more dimensions."""
        # fp32 loses nothing, so that there would be nothing to make up for.
        differences = self.differences and self.refresh != "fp32"
        refresh, shards = self._weight_codec(self.refresh), self._weight_codec(self.weights)
        intra, inter = self._gradient_codec(self.intra), self._gradient_codec(self.inter)
        return LevelFormat(refresh, differences, intra, inter, shards=shards)

    def vector(self) -> LevelFormat:
        """For norms and biases."""
        exact = Identity()
        return LevelFormat(exact, False, exact, exact, shards=exact)

    def levels(self, topology: Topology) -> Levels:
        """The groups of ranks on this grid; raises ConfigError where they do not fit it."""
        return levels_on(topology, self.weights_over, self.gradients_over)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Whose kernels are compiled before the workers start."""
        return *self.matrix().codecs, *self.vector().codecs

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> Plan:
        """4 N/s1 of weights, 4 N/s2 of gradient sums, 12 N/P of masters and moments, and whole units passing by."""
        levels = self.levels(topology)
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        units = lay_out(model, trained, self, cast(Any, Seat(topology)), levels)
        numel = sum(unit.numel for unit in units)
        sent = agreement_sent(topology, len(trained))
        staying = sum(unit.numel for unit in units if unit.stays)
        # One computes and the next one comes.
        others = sorted((unit.numel for unit in units if not unit.stays), reverse=True)[:2]
        weights_passing = staying + sum(others) if levels.weights_over > 1 else 0
        gradients_passing = staying + sum(others[:1])
        mean = numel // topology.world_size if levels.num_blocks > 1 else 0
        return Plan(
            weights=4 * numel // levels.weights_over,
            gradients=4 * (numel // levels.gradients_over + mean),
            optimizer=12 * numel // topology.world_size,
            passing=4 * (weights_passing + gradients_passing),
            sent=sent | sent_by(units, micro_batches),
        )

    def _weight_codec(self, width: str) -> Codec:
        # Nearest: both gathers of a micro-batch give the same weights, and differences need a contraction.
        return PLAIN[width] if width in PLAIN else Integer(int(width[3:]), WEIGHT_GROUP, "nearest")

    def _gradient_codec(self, width: str) -> Codec:
        if width in PLAIN:
            return PLAIN[width]
        quantizer = Integer(int(width[3:]), GRADIENT_GROUP, "stochastic", "bf16")
        return Hadamard(quantizer, self.hadamard) if self.hadamard else quantizer
