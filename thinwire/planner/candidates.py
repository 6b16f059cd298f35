"""Lists the ways to train a model on some machines, for all code that chooses between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from thinwire.errors import ConfigError
from thinwire.methods.options import FP32
from thinwire.methods.pipeline.options import FITTED, Pipeline
from thinwire.methods.pipeline.recompute import AUTO

# Orders that some case makes the fastest; the others hold more, or wait longer on a link.
PLANS = (FITTED, "1f1b", "zbv")
RECOMPUTE = ("never", "except-last", "always")
# Sequences of a micro-batch at most.
LARGEST_MICRO_BATCH = 32


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        replicas: number of copies of each stage that train on different data; `strategy` joins their ranks.
        micro_batch: number of its sequences.
        num_micro_batches: of one pipeline in a step.
        tensor: ranks over which the matrices of each replica are cut.
        sequence: ranks that share each sequence of a replica.
        memory: most memory of a rank, such as 800mb, where the rest lies on a disk; empty: all is in memory.
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

    @property
    def sharing(self) -> int:
        """Number of ranks that the strategy joins: copies, and ranks that share a sequence."""
        return self.replicas * self.sequence

    @property
    def mesh(self) -> str:
        """The axes with several ranks, from the outside in."""
        sizes = {"pipeline": self.stages, "data": self.replicas, "sequence": self.sequence, "tensor": self.tensor}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"

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
        axes = {"stages": self.stages, "sequence.parallel": self.sequence, "tensor": self.tensor}
        cut = [f"--{axis} {ranks}" for axis, ranks in axes.items() if ranks > 1]
        table += [f"--memory {self.memory}"] if self.memory else []
        return " ".join([*cut, f"--micro-batch {self.micro_batch}", f"--strategy {self.strategy}", *table])


def candidates(
    num_ranks: int, num_layers: int, num_sequences: int, strategies: Sequence[str], stated: Mapping[str, Any],
    largest: int = LARGEST_MICRO_BATCH, tensors: Sequence[int] = (1,), sequences: Sequence[int] = (1,),
) -> Iterator[Candidate]:  # fmt: skip
    """All ways to train `num_sequences` in a step, sorted so that those that change less of the training come first.

    stated: options of the pipeline that are fixed. largest: largest micro-batch. tensors: numbers of ranks over which
    matrices may be cut. sequences: numbers of ranks that may share a sequence, without stages and tensor ranks. If a
    strategy has a single rank, it sends nothing, and the first one stands for all.
    """
    default = (Pipeline.forward, Pipeline.backward)
    codecs = [(FP32, FP32), default]
    free: dict[str, tuple[str, ...]] = {"plan": PLANS, "recompute": RECOMPUTE}
    free.update({name: (stated[name],) for name in free if stated.get(name, AUTO) != AUTO})
    if "forward" in stated or "backward" in stated:
        codecs = [(stated.get("forward", default[0]), stated.get("backward", default[1]))]
    rest = {name: value for name, value in stated.items() if name not in (*free, "forward", "backward")}
    for stages, tensor, shared in product(range(1, min(num_ranks, num_layers) + 1), tensors, sequences):
        # A sequence axis works beside a data axis alone.
        if shared > 1 and stages * tensor > 1:
            continue
        replicas, rest_of_ranks = divmod(num_ranks, stages * tensor * shared)
        if rest_of_ranks or num_sequences % replicas:
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
                yield Candidate(name, stages, replicas, size, each // size, pipeline, tensor, shared)
