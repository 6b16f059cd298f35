"""Three-level sharding: weights over a few near ranks, gradients over a node, the optimizer over all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from thinwire.codecs import Identity
from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.layout.buckets import Unit, lay_out, sent_by
from thinwire.layout.formats import LevelFormat
from thinwire.layout.layers import layers_of
from thinwire.layout.levels import Levels, levels_on
from thinwire.layout.zeros import describe_zeros
from thinwire.methods.options import REPEATABLE, check_types, codec_of
from thinwire.methods.sharded import ShardedMethod
from thinwire.table import Row


@dataclass(frozen=True)
class Frontier(ShardedMethod):
    """Weights cut over s1 near ranks, gradients over s2, masters and the optimizer's state over all P; s1 | s2 | P.

    Norms and biases travel in fp32.

    Raises ConfigError for a text that is no codec, weights that would be rounded at random, and a refresh of few bits
    without differences.
    Source: "Scaling Large Language Model Training on Frontier with Low-Bandwidth Partitioning", 2025; weight
    differences: SDP4Bit, NeurIPS 2024.
    """

    name: ClassVar[str] = "frontier"
    no_local_gradient: ClassVar[str] = "sums the gradients of a layer over the ranks as soon as backward leaves it"
    not_on_fsdp: ClassVar[str] = "cuts a model in its own way, not FSDP2's: use `thinwire train --strategy frontier`"

    weights_over: int | None = None
    """Ranks s1 that share the weights, a divisor of P; by default 2 if nodes have an even number of ranks, else 1."""
    gradients_over: int | None = None
    """Ranks s2 that share the gradients, a multiple of s1 that divides P; by default the ranks of a node."""
    # Short groups: parameters are padded to them, and every shard holds whole ones. With bf16 scales, 64 gradients
    # cost what 128 do with fp32 scales, and lose less.
    weights: str = "int8/256:nearest"
    """Codec of a module's weights in the gather before its forward and its backward: no stochastic rounding."""
    intra_gradients: str = "int8/64:bf16+hadamard32"
    """Codec of gradients inside a node, summed there after every micro-batch."""
    inter_gradients: str = "int4/64:bf16+hadamard32"
    """Codec of gradients between nodes, once a step."""
    refresh: str = "int8/256:nearest"
    """Codec of the updated weights on their way from the masters, once a step; 8 bits at least without
    differences."""
    differences: bool = True
    """Refresh with master - weight instead of the master: what is lost comes back in the next step."""

    def __post_init__(self) -> None:
        check_types(self)
        for option in ("weights_over", "gradients_over"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(f"{option} {value} of frontier: must be at least 1; nearest: 1")
        if not self.differences and codec_of(self, "refresh").bits_per_element < 8:
            raise ConfigError(
                f"refresh {self.refresh!r} of Frontier without differences would lose all small updates: set "
                "differences, or refresh to 'int8/256:nearest'"
            )
        self.matrix()

    def matrix(self) -> LevelFormat:
        refresh = codec_of(self, "refresh")
        return LevelFormat(
            refresh,
            # fp32 loses nothing, so that there would be nothing to make up for.
            differences=self.differences and not refresh.traits.lossless,
            intra=codec_of(self, "intra_gradients"),
            inter=codec_of(self, "inter_gradients"),
            shards=codec_of(self, "weights", REPEATABLE),
        )

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
            "weights": (wire.shards, near > 1, "weights are whole on every rank"),
            "intra_gradients": (wire.intra, max(block.local_size, column.local_size) > 1, "no hop inside nodes"),
            "inter_gradients": (wire.inter, max(block.num_nodes, column.num_nodes) > 1, "there is one node"),
            "refresh": (wire.weights, near < world_size, "every rank's masters are of its own weights"),
        }
        for option, (codec, travels, why_not) in hops.items():
            why = f"{codec.bits_per_element:.4g} bits an element" if travels else why_not
            rows.append((f"{option} {getattr(self, option)}", str(codec) if travels else "no effect", why))
        if self.differences:
            effect = "on" if wire.differences else "no effect"
            rows.append(("differences", effect, "" if wire.differences else "fp32 loses nothing"))
        further = (sum(sent_by(units, 2).values()) - sum(sent_by(units, 1).values())) / 1e6
        rows.append(("each further micro-batch", f"{further:.3f} MB", "none of it between blocks"))
        travel = [codec for codec, travels, _ in (hops["intra_gradients"], hops["inter_gradients"]) if travels]
        return [*rows, ("norms and biases", "fp32", ""), *describe_zeros(travel)]
