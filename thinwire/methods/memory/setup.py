"""What a rank trains, by shapes alone, and what it keeps of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import nn

from thinwire.calibration.process import USUAL, ProcessMemory
from thinwire.collectives import Topology
from thinwire.layout.buckets import Unit
from thinwire.layout.layers import names_by_layer
from thinwire.methods.interface import Cuts, MethodPlan
from thinwire.methods.memory.residency import FP32_BYTES
from thinwire.methods.sharded import ShardedMethod
from thinwire.methods.sums import ParamGroups, parts_of
from thinwire.optim import Part, SummingOptimizer
from thinwire.tiers.pool import BLOCK_BYTES, aligned

# Buckets of fewer elements stay in memory.
SMALL_NUMEL = 100_000
# Master, and AdamW's two moments.
NUM_STATES = 3
# Of a piece: its master and at most so many kinds of state begin with a block.
MOST_TENSORS = 4
# Of what is read in pages: one in use, one that is read, one that is written.
NUM_PAGES = 3
# What waits between the parts of an update, and the messages with it.
WITH_MESSAGES = 2
# The most bytes of a micro-batch in memory, by what becomes of activations; and what a forward leaves on a disk.
KeptBytes = Mapping[str, int]


class StateBytes(NamedTuple):
    """Masters and optimizer state of the rank that has most of them, in bytes.

    Attributes:
        whole: all of it.
        disk: all of it on a disk, in pieces of tensors; 0: it lies there in sub-groups.
        piece: the largest piece of a tensor, with its state, and the pages that what is read in pages passes through.
        paged: what is read in pages.
        masters: those of pieces of tensors, in fp32.
        sums: what waits between the parts of an update. at_once: the same, if one matrix is stepped at a time.
        num_reads: how often a step reads all of it from a disk; what is read in pages, once more.
    """

    whole: int
    disk: int = 0
    piece: int = 0
    masters: int = 0
    sums: int = 0
    at_once: int = 0
    num_reads: int = 1
    paged: int = 0


@dataclass(frozen=True)
class Across:
    """An optimizer that looks across matrices. groups: its group of each parameter that it looks across, by name."""

    optimizer: SummingOptimizer
    groups: ParamGroups

    def state_bytes(self, cuts: Cuts, rank: int) -> StateBytes:
        """Of a rank. cuts: of all trained parameters."""
        world_size = max((len(spans) for _, spans in cuts.values()), default=1)
        parts = parts_of({name: cut for name, cut in cuts.items() if name in self.groups}, rank, self.groups)
        sizes, passing, disk, paged, pages = [0], [0], 0, 0, 0
        for name, (_, spans) in cuts.items():
            numel = spans[rank][1] - spans[rank][0]
            if numel:
                sizes.append(FP32_BYTES * numbers_of(self.optimizer, numel, parts.get(name)))
                disk += piece_bytes(self.optimizer, numel, parts.get(name))
                own = paged_bytes(self.optimizer, parts.get(name))
                passing.append(sizes[-1] - own)
                paged, pages = paged + own, max(pages, NUM_PAGES * min(own, self.optimizer.page_bytes))
        sums = [0]
        for rounds in self.optimizer.sums(parts).values():
            each = [
                sum(one.width * sum(last - first for first, last in (one.adds[rank], one.wants[rank])) for one in of)
                for of in (named.values() for named in rounds)
            ]
            sums.append(FP32_BYTES * max(each, default=0) * (WITH_MESSAGES if world_size > 1 else 1))
        reads = self.optimizer.num_rounds + (not self.optimizer.starts_bare)
        masters = FP32_BYTES * sum(spans[rank][1] - spans[rank][0] for _, spans in cuts.values())
        return StateBytes(sum(sizes), disk, max(passing) + pages, masters, sum(sums), max(sums), reads, paged)


def numbers_of(optimizer: SummingOptimizer, numel: int, part: Part | None) -> int:
    """How many numbers a piece of a tensor has with its state. part: see Part; None: it takes AdamW's step."""
    return numel + (2 * numel if part is None else optimizer.num_kept(part))


def paged_bytes(optimizer: SummingOptimizer, part: Part | None) -> int:
    """Bytes of such a piece's state that are read in pages, in whole blocks."""
    return 0 if part is None else aligned(FP32_BYTES * optimizer.num_paged(part))


def piece_bytes(optimizer: SummingOptimizer, numel: int, part: Part | None) -> int:
    """The most bytes of such a piece on a disk, where each tensor begins with a block."""
    return aligned(FP32_BYTES * numbers_of(optimizer, numel, part)) + MOST_TENSORS * BLOCK_BYTES


def names_of(unit: Unit) -> set[str]:
    """The names of the parameters in a unit."""
    return {name for layout in unit.layouts for name in layout.names}


@dataclass(frozen=True)
class Setup:
    """What a rank trains, of which only shapes are used.

    Attributes:
        method: inside an island, if there are islands. topology: of an island.
        micro_batches: of a step.
        kept: the most bytes that a micro-batch takes, by what becomes of activations, see `kept_ways`; None: not known.
        across: an optimizer that looks across matrices; None: another, which is counted as AdamW.
        at_once: buckets may be stepped as gradients arrive; they are where the budget asks for it.
        outer: bytes of what islands exchange and an island's first rank keeps in memory, by name.
        is_built_whole: every rank has the whole model in memory before its weights go where they lie.
        process: what a worker takes before it has a model.
    """

    method: ShardedMethod
    model: nn.Module
    topology: Topology
    micro_batches: int = 1
    kept: KeptBytes | None = None
    across: Across | None = None
    at_once: bool = False
    outer: Mapping[str, int] = field(default_factory=dict)
    is_built_whole: bool = False
    process: ProcessMemory = USUAL

    @cached_property
    def plan(self) -> MethodPlan:
        """The method's, for AdamW."""
        return self.method.plan(self.model, self.topology, self.micro_batches)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The buckets of the model."""
        trained = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        return self.method.units(self.model, trained, [self.method.levels(self.topology)], lambda _: 0, None)

    @cached_property
    def states(self) -> StateBytes:
        """Masters and optimizer state."""
        if self.across is None:
            return StateBytes(self.plan.optimizer)
        names = {name for name, param in self.model.named_parameters() if param.requires_grad}
        cuts = self.method.cuts(self.model, self.topology, names)
        ranks = range(self.topology.world_size)
        return max((self.across.state_bytes(cuts, rank) for rank in ranks), key=lambda found: found.whole)

    @property
    def is_cut(self) -> bool:
        """Whether weights are cut over ranks."""
        return self.method.levels(self.topology).weights_over > 1

    @cached_property
    def mean_bytes(self) -> int:
        """Bytes of the mean gradients of which a rank has the masters."""
        return self.plan.optimizer // NUM_STATES

    @cached_property
    def largest_bytes(self) -> int:
        """Bytes of the largest bucket."""
        return max((FP32_BYTES * unit.numel for unit in self.units), default=0)

    @cached_property
    def layer_bytes(self) -> list[int]:
        """Bytes of the large buckets of each layer."""
        large = [unit for unit in self.units if unit.numel >= SMALL_NUMEL]
        return [
            sum(FP32_BYTES * unit.numel for unit in large if names_of(unit) & own) for own in names_by_layer(self.model)
        ]

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of all weights, trained or not."""
        return sum(FP32_BYTES * param.numel() for param in self.model.parameters())

    @cached_property
    def tied_bytes(self) -> int:
        """Bytes of the gradients of trained weights that several modules share."""
        modules = self.model.modules()
        uses = Counter(param for module in modules for param in module._parameters.values() if param is not None)
        return sum(FP32_BYTES * param.numel() for param, num in uses.items() if num > 1 and param.requires_grad)
