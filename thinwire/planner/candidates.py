"""Lists the ways to train a model on some machines, for all code that chooses between them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from thinwire.errors import ConfigError
from thinwire.flags import flag
from thinwire.layout.mesh import apart
from thinwire.methods.options import FP32
from thinwire.methods.pipeline.options import FITTED, Pipeline
from thinwire.methods.pipeline.recompute import AUTO
from thinwire.options import RESIDENCY
from thinwire.planner.settings import name_of, table_of
from thinwire.run.places import FLAT

# Orders that some case makes the fastest; the others hold more, or wait longer on a link.
PLANS = (FITTED, "1f1b", "zbv")
RECOMPUTE = ("never", "except-last", "always")
# Sequences of a micro-batch at most.
LARGEST_MICRO_BATCH = 32


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        strategy: its name, or one of its settings, written `NAME[option=value,...]`; see `planner.settings`.
        replicas: number of copies of each stage that train on different data; `strategy` joins their ranks.
        micro_batch: number of its sequences.
        num_micro_batches: of one pipeline in a step.
        tensor: ranks over which the matrices of each replica are cut.
        sequence: ranks that share each sequence of a replica.
        memory: most memory of a rank, such as 800mb, where the rest lies on a disk; empty: all is in memory.
        held: other options of what lies where, by the names of Residency; empty, as `memory`: all is kept in memory.
        experts: ranks that share the experts of a mixture; each is a replica with data of its own.
        outer: method of islands, or one of its settings; each island trains as the fields above say. Empty: there are
            none.
        islands: number of islands.
        nodes: machines of each island; 1: it lies inside one.
        travel: options of what travels to or from experts, once it is chosen.
        group: ranks that the strategy takes for those of one node, neighbours: `--local-size`. 0: those of a machine.
    """

    strategy: str
    stages: int
    replicas: int
    micro_batch: int
    num_micro_batches: int
    pipeline: Pipeline
    tensor: int = 1
    sequence: int = 1
    memory: str = ""
    held: tuple[tuple[str, Any], ...] = ()
    experts: int = 1
    outer: str = ""
    islands: int = 1
    nodes: int = 1
    travel: tuple[tuple[str, Any], ...] = ()
    group: int = 0

    @property
    def num_ranks(self) -> int:
        """Ranks of all islands."""
        return self.islands * self.stages * self.sharing * self.tensor

    @property
    def inside(self) -> Candidate:
        """What one island does."""
        return replace(self, outer="", islands=1, nodes=1)

    @property
    def method(self) -> str:
        """The strategy, and around it the method of islands: what decides how much is learnt from a token."""
        return f"{self.outer} of {self.strategy}" if self.outer else self.strategy

    @property
    def settings(self) -> dict[str, Mapping[str, Any]]:
        """Options of the strategy and of the method of islands that were searched, by table."""
        return {**table_of(self.strategy), **table_of(self.outer)}

    @property
    def setting_flags(self) -> list[str]:
        """Flags of the settings that were searched."""
        own = [(name, each) for name, options in self.settings.items() for each in options.items()]
        return [f"--{name}.{option} {shlex.quote(str(value))}" for name, (option, value) in own]

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks of each axis of the mesh, from the outside in."""
        return {
            "island": self.islands, "pipeline": self.stages, "data": self.replicas // self.experts,
            "expert": self.experts, "sequence": self.sequence, "tensor": self.tensor,
        }  # fmt: skip

    @property
    def not_yet(self) -> str:
        """Why the house can't train so yet; empty: it can."""
        cut = [axis for axis, ranks in self.sizes.items() if ranks > 1]
        if axes := apart(cut):
            return f"a mesh with {' beside '.join(axes)} is not supported yet"
        return "an island of several machines is not supported yet" if self.nodes > 1 else ""

    @property
    def is_resident(self) -> bool:
        """Whether a part lies on a disk, or is computed again without a pipeline."""
        return bool(self.memory or self.held)

    @property
    def residency(self) -> dict[str, Any]:
        """The options of what lies where; empty: all is kept in memory."""
        return {**({"memory": self.memory} if self.memory else {}), **dict(self.held)}

    @property
    def sharing(self) -> int:
        """Number of ranks that the strategy joins: copies, and ranks that share a sequence."""
        return self.replicas * self.sequence

    @property
    def mesh(self) -> str:
        """The axes with several ranks, from the outside in."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "data=1"

    @property
    def layout(self) -> str:
        """The mesh, and the groups of ranks if they are not machines."""
        return f"{self.mesh}, groups of {self.group}" if self.group else self.mesh

    @property
    def borders(self) -> str:
        """The codecs of hidden states and of their gradients."""
        return f"{self.pipeline.forward}, {self.pipeline.backward}" if self.stages > 1 else ""

    @property
    def options(self) -> dict[str, str]:
        """The pipeline's options that were searched; empty without a pipeline."""
        searched = ("plan", "forward", "backward", "recompute") if self.stages > 1 else ()
        return {name: getattr(self.pipeline, name) for name in searched}

    @property
    def flags(self) -> str:
        """The flags for `thinwire train`."""
        table = [f"--pipeline.{name} {value}" for name, value in self.options.items() if value != "never"]
        axes = {"stages": self.stages, "experts.parallel": self.experts, "sequence.parallel": self.sequence}
        cut = [f"--{axis} {ranks}" for axis, ranks in (axes | {"tensor": self.tensor}).items() if ranks > 1]
        table += [f"--experts.{name} {value}" for name, value in self.travel]
        table += residency_flags(self.residency)
        table += [f"--local-size {self.group}"] if self.group else []
        table += self.setting_flags
        strategy = f"--strategy {name_of(self.strategy)}"
        if self.outer:
            size = self.num_ranks // self.islands
            strategy = f"--strategy {name_of(self.outer)} --inner {self.strategy} --local-size {size}"
        return " ".join([*cut, f"--micro-batch {self.micro_batch}", strategy, *table])


def residency_flags(options: Mapping[str, Any]) -> list[str]:
    """The flags of options of what lies where."""
    return [f"{flag(name if name in FLAT else f'{RESIDENCY}.{name}')} {value}" for name, value in options.items()]


@dataclass(frozen=True)
class AxisSizes:
    """The numbers of ranks to try on some axes.

    Attributes:
        tensors: over which matrices may be cut.
        sequences: that may share a sequence.
        experts: that may share the experts of a mixture.
        islands: numbers of islands, all of equal size.
        local_size: ranks of a machine.
    """

    tensors: Sequence[int] = (1,)
    sequences: Sequence[int] = (1,)
    experts: Sequence[int] = (1,)
    islands: Sequence[int] = ()
    local_size: int = 1


def candidates(
    num_ranks: int, num_layers: int, num_sequences: int, strategies: Sequence[str], stated: Mapping[str, Any],
    largest: int = LARGEST_MICRO_BATCH, axes: AxisSizes | None = None, outers: Sequence[str] = (),
) -> Iterator[Candidate]:  # fmt: skip
    """All ways to train `num_sequences` in a step, sorted so that those that change less of the training come first.

    Also those that the house can't train yet, see `Candidate.not_yet`.

    stated: options of the pipeline that are fixed. largest: largest micro-batch. outers: methods of islands. If a
    strategy has a single rank, it sends nothing, and the first one stands for all. Islands train by strategies as they
    are, without further settings; those of several machines have a data axis alone.
    """
    axes = axes or AxisSizes()
    sizes = stated, largest, axes
    inner = [name for name in strategies if name == name_of(name)]
    yield from of_one_island(num_ranks, num_layers, num_sequences, strategies, *sizes)
    for islands, outer in product(axes.islands, outers):
        if num_sequences % islands == 0:
            size = num_ranks // islands
            nodes = max(1, size // axes.local_size)
            for way in of_one_island(size, num_layers, num_sequences // islands, inner, *sizes):
                if nodes == 1 or way.replicas == size:
                    yield replace(way, outer=outer, islands=islands, nodes=nodes)


def of_one_island(
    num_ranks: int, num_layers: int, num_sequences: int, strategies: Sequence[str], stated: Mapping[str, Any],
    largest: int, axes: AxisSizes,
) -> Iterator[Candidate]:  # fmt: skip
    """Yield the candidates without islands."""
    default = (Pipeline.forward, Pipeline.backward)
    codecs = [(FP32, FP32), default]
    free: dict[str, tuple[str, ...]] = {"plan": PLANS, "recompute": RECOMPUTE}
    free.update({name: (stated[name],) for name in free if stated.get(name, AUTO) != AUTO})
    if "forward" in stated or "backward" in stated:
        codecs = [(stated.get("forward", default[0]), stated.get("backward", default[1]))]
    rest = {name: value for name, value in stated.items() if name not in (*free, "forward", "backward")}
    for stages, tensor, shared, experts in product(
        range(1, min(num_ranks, num_layers) + 1), axes.tensors, axes.sequences, axes.experts
    ):
        replicas, rest_of_ranks = divmod(num_ranks, stages * tensor * shared)
        if rest_of_ranks or num_sequences % replicas or replicas % experts:
            continue
        each = num_sequences // replicas
        sizes = [size for size in range(1, min(each, largest) + 1) if each % size == 0]
        if stages == 1:
            # Fewer passes cost less than a simulation that knows no overhead says.
            sizes.reverse()
        names = strategies if replicas * shared > 1 else strategies[:1]
        plans = free["plan"] if stages > 1 else ("1f1b",)
        borders = codecs if stages > 1 else codecs[:1]
        modes = free["recompute"] if stages > 1 else ("never",)
        for name, size, plan, (forward, backward), mode in product(names, sizes, plans, borders, modes):
            options: dict[str, Any] = {"plan": plan, "forward": forward, "backward": backward, "recompute": mode}
            # What an order or a cut can't take is no candidate.
            with suppress(ConfigError):
                pipeline = Pipeline(**(rest if stages > 1 else {}), **options)
                yield Candidate(
                    name, stages, replicas, size, each // size, pipeline, tensor, shared, experts=experts
                )  # fmt: skip
