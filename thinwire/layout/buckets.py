"""Where every parameter lies: flat buckets, aligned to codec blocks, cut into one shard per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Debt
from thinwire.collectives import Communicator, Topology
from thinwire.collectives.feedback import Lost
from thinwire.collectives.gather import gather_bytes
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import reduce_bytes
from thinwire.layout.formats import Strategy, WireFormat
from thinwire.state.portable import GRADIENTS, Held, Owed

# Padding at a bucket's end is half of world_size * block elements on average: below 1 percent with this many.
MIN_UNITS_PER_BUCKET = 64
DEFAULT_BUCKET_NUMEL = 1 << 19


@dataclass(frozen=True)
class Seat:
    """The first place in a group of which only the grid is known, to plan a layout."""

    topology: Topology
    rank: int = 0

    @property
    def world_size(self) -> int:
        return self.topology.world_size


@dataclass(eq=False)
class Slot:
    """One parameter's place in its bucket: elements [start, start + numel)."""

    name: str
    param: nn.Parameter
    index: int
    start: int
    bucket: Bucket = field(repr=False)

    @property
    def end(self) -> int:
        return self.start + self.param.numel()

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.end].view(self.param.shape)

    def held(self, piece: Tensor, start: int) -> Held:
        """What begins at element `start` of this rank's shard, as a part of the parameter."""
        return Held(piece, self.param.numel(), self.bucket.shard_start + start - self.start)


@dataclass(frozen=True, eq=False)
class SentGradient:
    """The gradient of a parameter as it was when it was sent, to tell whether it was changed since; None for none."""

    grad: Tensor | None
    version: int

    @classmethod
    def of(cls, param: nn.Parameter) -> SentGradient:
        return cls(param.grad, -1 if param.grad is None else param.grad._version)

    def is_still_that_of(self, param: nn.Parameter) -> bool:
        return param.grad is self.grad and (self.grad is None or self.grad._version == self.version)


@dataclass(eq=False)
class Bucket:
    """Parameters that travel together.

    live: the replica, of the model's dtype, [numel]; the model's parameters are views into it. master, shard_grad: fp32
    [shard_numel], this rank's slice of the masters and of the mean gradient. (stream, first_counter) number the
    elements for the codecs' randomness, whatever the bucket size.
    """

    wire: WireFormat
    comm: Communicator
    dtype: torch.dtype
    stream: int
    first_counter: int
    slots: list[Slot] = field(default_factory=list)
    numel: int = 0
    live: Tensor = field(init=False)
    master: Tensor = field(init=False)
    shard_grad: Tensor = field(init=False)
    # State of the step under way.
    ready: set[int] = field(default_factory=set)
    sent: list[SentGradient] = field(default_factory=list)
    reducing: Future | None = None
    gathering: Future | None = None
    # What the gradients' codecs lost on this rank; None without error feedback.
    lost: Lost | None = None
    live_fingerprint: int = 0

    @property
    def shard_numel(self) -> int:
        return self.numel // self.comm.world_size

    @property
    def shard_start(self) -> int:
        return self.comm.rank * self.shard_numel

    @property
    def live_shard(self) -> Tensor:
        return self.live[self.shard_start : self.shard_start + self.shard_numel]

    def shard_range(self, slot: Slot) -> tuple[int, int]:
        """The part of this rank's shard that belongs to `slot`, empty where they do not meet."""
        start = max(slot.start - self.shard_start, 0)
        return start, max(min(slot.end - self.shard_start, self.shard_numel), start)

    def flat_gradient(self, link: Link, grads: Sequence[Tensor | None]) -> Tensor:
        """The gradients of the slots, fp32 [numel] in scratch memory, zero where there is none."""
        flat = link.scratch("gradient", self.numel, dtype=torch.float32, device=self.live.device)
        ends = [*(slot.start for slot in self.slots[1:]), self.numel]
        for slot, grad, end in zip(self.slots, grads, ends, strict=True):
            if grad is None:
                flat[slot.start : end].zero_()
                continue
            slot.view(flat).copy_(grad)
            flat[slot.end : end].zero_()
        return flat

    @property
    def errors(self) -> list[Tensor]:
        """The tensors of `lost`: those of the hops that lose something."""
        return [] if self.lost is None else [error for error in (self.lost.intra, self.lost.inter) if error is not None]

    def allocate(self) -> None:
        """Move the parameters into one flat tensor and make this rank's shards; padding is zero everywhere."""
        self.live = torch.zeros(self.numel, dtype=self.dtype, device=self.slots[0].param.device)
        for slot in self.slots:
            slot.view(self.live).copy_(slot.param.data)
            slot.param.data = slot.view(self.live)
        self.master = self.live_shard.float().clone()
        self.shard_grad = torch.zeros_like(self.master)
        if self.lost_numel:
            lost = Lost.zeros(self.comm.topology, self.shard_numel, self.live.device)
            self.lost = Lost(None if self.wire.intra.traits.lossless else lost.intra, lost.inter)

    @property
    def lost_numel(self) -> int:
        """Elements of the tensors of `lost`."""
        grid, wire = self.comm.topology, self.wire
        if not wire.feedback:
            return 0
        intra = grid.world_size if grid.local_size > 1 and not wire.intra.traits.lossless else 0
        return (intra + (grid.num_nodes if grid.num_nodes > 1 else 0)) * self.shard_numel

    @property
    def has_replica(self) -> bool:
        """Whether the weights that compute are other numbers than the masters."""
        is_lossy = self.dtype != torch.float32 or not self.wire.weights.traits.lossless
        return is_lossy and self.comm.world_size > 1

    def debts(self, path: str) -> Iterator[Debt]:
        """Where in `errors`, which lies at `path`, is what is owed to which parameter."""
        if self.lost is None:
            return
        for tensor, start, place, length in self.lost.places(self.comm.topology, self.comm.rank):
            number = next((i for i, error in enumerate(self.errors) if error is tensor), None)
            for slot in self.slots if number is not None else ():
                first, last = max(slot.start, place), min(slot.end, place + length)
                if first < last:
                    yield Debt(
                        GRADIENTS, slot.name, f"{path}/{number}", start + first - place, first - slot.start,
                        last - first, 1 / self.comm.world_size,
                    )  # fmt: skip

    def owe(self, owed: Owed) -> None:
        """Take this rank's share of what other ranks owed: (kind, parameter) -> the mean over ranks, flat, if any."""
        if not self.errors or self.lost is None:
            return
        whole = torch.zeros(self.numel, device=self.live.device)
        for slot in self.slots:
            if (value := owed(GRADIENTS, slot.name)) is not None:
                whole[slot.start : slot.end] = value
        self.lost.owe(whole, self.comm.topology, self.comm.rank)

    def sent_bytes(self) -> dict[tuple[str, str], int]:
        """Payload this rank sends in a step, by operation and level."""
        grid, wire, n = self.comm.topology, self.wire, self.shard_numel
        gradients = reduce_bytes(grid, n, wire.intra, wire.inter)
        weights = gather_bytes(grid, wire.weights.packet_bytes(n))
        by_operation = {"gradients": gradients, "weights": weights}
        return {(name, level): sent for name, levels in by_operation.items() for level, sent in levels.items()}


AnyBucket = TypeVar("AnyBucket", bound=Bucket)


def build_buckets(
    named_params: Iterable[tuple[str, nn.Parameter]],
    strategy: Strategy,
    comm_for: Callable[[str, nn.Parameter], Communicator],
    bucket_numel: int | None,
    make: Callable[..., AnyBucket],
) -> list[AnyBucket]:
    """Lay parameters out in order of registration; buckets hold one wire format, dtype and group each.

    Every parameter starts at a multiple of its format's block, so no group of the quantiser spans two parameters and
    results do not depend on the bucket size. A parameter larger than a bucket has one alone.
    """
    formats = {True: strategy.vector(), False: strategy.matrix()}
    open_buckets: dict[tuple, AnyBucket] = {}
    counters: dict[tuple, int] = {}
    buckets: list[AnyBucket] = []
    for index, (name, param) in enumerate(named_params):
        is_vector = param.dim() < 2
        wire, comm = formats[is_vector], comm_for(name, param)
        key = (is_vector, param.dtype, id(comm))
        length = _round_up(param.numel(), wire.block)
        unit = wire.block * comm.world_size
        limit = max(bucket_numel or DEFAULT_BUCKET_NUMEL, unit if bucket_numel else MIN_UNITS_PER_BUCKET * unit)
        bucket = open_buckets.get(key)
        if bucket is None or (bucket.slots and bucket.numel + length > limit):
            stream = list(counters).index(key) if key in counters else len(counters)
            bucket = open_buckets[key] = make(wire, comm, param.dtype, stream, counters.get(key, 0))
            buckets.append(bucket)
        bucket.slots.append(Slot(name, param, index, bucket.numel, bucket))
        bucket.numel += length
        counters[key] = counters.get(key, 0) + length
    for bucket in buckets:
        bucket.numel = _round_up(bucket.numel, bucket.wire.block * bucket.comm.world_size)
    return buckets


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
