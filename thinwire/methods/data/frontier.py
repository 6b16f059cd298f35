"""Three-level sharding: weights over a few near ranks, gradients over a node, the optimizer over all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from thinwire.codecs import Cast, Codec, Hadamard, Identity, Integer
from thinwire.collectives import Topology
from thinwire.errors import ConfigError, nearest
from thinwire.layout.formats import LevelFormat
from thinwire.layout.layers import layers_of
from thinwire.layout.levels import Levels, levels_on
from thinwire.layout.spans import Unit, lay_out, sent_by
from thinwire.methods.options import check_types
from thinwire.methods.sharded import ShardedMethod
from thinwire.table import Row

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
class Frontier(ShardedMethod):
    """Weights cut over s1 near ranks, gradients over s2, masters and the optimizer's state over all P; s1 | s2 | P.

    Norms and biases travel in fp32.

    Raises ConfigError for other values, and for int4 without differences.
    Source: "Scaling Large Language Model Training on Frontier with Low-Bandwidth Partitioning", 2025; weight
    differences: SDP4Bit, NeurIPS 2024.
    """

    name: ClassVar[str] = "frontier"
    not_on_fsdp: ClassVar[str] = "cuts a model in its own way, not FSDP2's: use `thinwire train --strategy frontier`"

    weights_over: int | None = None
    """Ranks s1 that share the weights, a divisor of P; by default 2 if nodes have an even number of ranks, else 1."""
    gradients_over: int | None = None
    """Ranks s2 that share the gradients, a multiple of s1 that divides P; by default the ranks of a node."""
    weights: str = "int8"
    """Type of a module's weights in the gather before its forward and its backward: fp32, bf16 or int8."""
    intra: str = "int8"
    """Type of gradients inside a node, summed there after every micro-batch: fp32, bf16, int8 or int4."""
    inter: str = "int4"
    """Type of gradients between nodes, once a step: fp32, bf16, int8 or int4."""
    hadamard: int = 32
    """Elements in a block of the rotation around int8 and int4 gradients, a power of two from 2; 0: no rotation."""
    refresh: str = "int8"
    """Type of the updated weights on their way from the masters, once a step: fp32, bf16, int8 or int4."""
    differences: bool = True
    """Refresh with master - weight instead of the master: what is lost comes back in the next step."""

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
        # fp32 loses nothing, so that there would be nothing to make up for.
        differences = self.differences and self.refresh != "fp32"
        refresh, shards = self._weight_codec(self.refresh), self._weight_codec(self.weights)
        intra, inter = self._gradient_codec(self.intra), self._gradient_codec(self.inter)
        return LevelFormat(refresh, differences, intra, inter, shards=shards)

    def vector(self) -> LevelFormat:
        exact = Identity()
        return LevelFormat(exact, False, exact, exact, shards=exact)

    def levels(self, topology: Topology) -> Levels:
        """The groups of ranks on this grid; raises ConfigError where they do not fit it."""
        return levels_on(topology, self.weights_over, self.gradients_over)

    def units(
        self,
        model: nn.Module,
        trained: Mapping[str, Tensor],
        groups: Sequence[Levels],
        group_of: Callable[[str], int],
        bucket_numel: int | None,
    ) -> tuple[Unit, ...]:
        """The root first, then children of ModuleLists in order of registration.

        A parameter that two of them share is the root's. Raises ConfigError for `bucket_numel`.
        """
        if bucket_numel is not None:
            raise ConfigError(f"bucket_numel {bucket_numel}: frontier goes by modules, not by buckets; leave it out")
        layers = set(layers_of(model))
        paths = ["", *(path for path, module in model.named_modules() if module in layers)]
        users: dict[int, list[str]] = {}
        for path in paths[1:]:
            for param in model.get_submodule(path).parameters():
                users.setdefault(id(param), []).append(path)
        module_of = {
            name: used_by[0] if len(used_by := users.get(id(tensor), [])) == 1 else ""
            for name, tensor in trained.items()
        }
        ordered = sorted(trained.items(), key=lambda item: paths.index(module_of[item[0]]))
        return lay_out(ordered, self, groups, lambda name: (group_of(name), module_of[name]))

    def describe(self, levels: Levels, units: Sequence[Unit]) -> list[Row]:
        """Rows of (asked for, in effect, why)."""
        wire, world_size = self.matrix(), levels.topology.world_size
        near, wide = levels.weights_over, levels.gradients_over
        why_near = "stated" if self.weights_over else "2 where nodes have an even number of ranks, else 1"
        why_wide = "stated" if self.gradients_over else "by default a node"
        rows: list[Row] = [
            ("weights cut over", f"each {near} rank(s)", why_near),
            ("gradients cut over", f"each {wide} rank(s)", why_wide),
            ("masters cut over", f"all {world_size} rank(s)", "and the optimizer's state with them"),
            ("units", f"{len(units)}", "children of ModuleLists, and the root for the rest: whole one by one"),
        ]
        block, column = (levels.topology.subgroup(group(0)) for group in (levels.block, levels.column))
        hops = {
            f"weights {self.weights}": (wire.shards, near > 1, "weights are whole on every rank"),
            f"intra {self.intra}": (wire.intra, max(block.local_size, column.local_size) > 1, "no hop inside nodes"),
            f"inter {self.inter}": (wire.inter, max(block.num_nodes, column.num_nodes) > 1, "there is one node"),
            f"refresh {self.refresh}": (wire.weights, near < world_size, "every rank's masters are of its own weights"),
        }
        for asked, (codec, travels, why_not) in hops.items():
            why = f"{codec.bits_per_element:.4g} bits an element" if travels else why_not
            rows.append((asked, str(codec) if travels else "no effect", why))
        if self.differences:
            effect = "on" if wire.differences else "no effect"
            rows.append(("differences", effect, "" if wire.differences else "fp32 loses nothing"))
        if self.hadamard and not (wire.intra.rotation or wire.inter.rotation):
            rows.append((f"hadamard {self.hadamard}", "no effect", "gradients travel as floats"))
        further = (sum(sent_by(units, 2).values()) - sum(sent_by(units, 1).values())) / 1e6
        rows.append(("each further micro-batch", f"{further:.3f} MB", "none of it between blocks"))
        return [*rows, ("norms and biases", "fp32", "")]

    def _weight_codec(self, width: str) -> Codec:
        # Nearest: both gathers of a micro-batch give the same weights, and differences need a contraction.
        return PLAIN[width] if width in PLAIN else Integer(int(width[3:]), WEIGHT_GROUP, "nearest")

    def _gradient_codec(self, width: str) -> Codec:
        if width in PLAIN:
            return PLAIN[width]
        quantizer = Integer(int(width[3:]), GRADIENT_GROUP, "stochastic", "bf16")
        return Hadamard(quantizer, self.hadamard) if self.hadamard else quantizer
