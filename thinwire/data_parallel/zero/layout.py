"""Where every parameter lies: flat buckets, aligned to codec blocks, cut into one shard per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from thinwire.collectives import Communicator
from thinwire.collectives.algorithms import Link, Lost
from thinwire.data_parallel.strategies import Strategy, WireFormat

# Padding at a bucket's end is half of world_size * block elements on average: below 1 percent with this many.
MIN_UNITS_PER_BUCKET = 64
DEFAULT_BUCKET_NUMEL = 1 << 19


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

    def flat_gradient(self, link: Link) -> Tensor:
        """The gradients that were handed over, fp32 [numel] in scratch memory, zero where there is none."""
        flat = link.scratch("gradient", self.numel, dtype=torch.float32)
        for slot, sent, end in zip(
            self.slots, self.sent, [*(s.start for s in self.slots[1:]), self.numel], strict=True
        ):
            if sent.grad is None:
                flat[slot.start : end].zero_()
                continue
            slot.view(flat).copy_(sent.grad)
            flat[slot.end : end].zero_()
        return flat

    @property
    def errors(self) -> list[Tensor]:
        """The tensors of `lost`: those of the hops that lose something."""
        return [] if self.lost is None else [error for error in (self.lost.intra, self.lost.inter) if error is not None]

    def reduce_bytes(self) -> int:
        """Payload this rank sends for the gradients: hop 1, then hop 2."""
        grid, n = self.comm.topology, self.shard_numel
        intra = (grid.local_size - 1) * grid.num_nodes * self.wire.intra.packet_bytes(n)
        inter = (grid.num_nodes - 1) * self.wire.inter.packet_bytes(n)
        return intra + inter

    def gather_bytes(self) -> int:
        """Payload this rank sends for the weights."""
        return (self.comm.world_size - 1) * self.wire.weights.packet_bytes(self.shard_numel)


def build_buckets(
    named_params: Iterable[tuple[str, nn.Parameter]],
    strategy: Strategy,
    comm_for: Callable[[str, nn.Parameter], Communicator],
    bucket_numel: int | None,
) -> list[Bucket]:
    """Lay parameters out in order of registration; buckets hold one wire format, dtype and group each.

    Every parameter starts at a multiple of its format's block, so no group of the quantiser spans two parameters and
    results do not depend on the bucket size. A parameter larger than a bucket has one alone.
    """
    formats = {True: strategy.vector(), False: strategy.matrix()}
    open_buckets: dict[tuple, Bucket] = {}
    counters: dict[tuple, int] = {}
    buckets: list[Bucket] = []
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
            bucket = open_buckets[key] = Bucket(wire, comm, param.dtype, stream, counters.get(key, 0))
            buckets.append(bucket)
        bucket.slots.append(Slot(name, param, index, bucket.numel, bucket))
        bucket.numel += length
        counters[key] = counters.get(key, 0) + length
    for bucket in buckets:
        bucket.numel = _round_up(bucket.numel, bucket.wire.block * bucket.comm.world_size)
        _allocate(bucket)
    return buckets


def _allocate(bucket: Bucket) -> None:
    """Move the parameters into one flat tensor and make this rank's shards; padding is zero everywhere."""
    bucket.live = torch.zeros(bucket.numel, dtype=bucket.dtype)
    for slot in bucket.slots:
        slot.view(bucket.live).copy_(slot.param.data)
        slot.param.data = slot.view(bucket.live)
    bucket.master = bucket.live_shard.float().clone()
    bucket.shard_grad = torch.zeros(bucket.shard_numel)
    if bucket.wire.feedback and bucket.comm.world_size > 1:
        lost = Lost.zeros(bucket.comm.topology, bucket.shard_numel)
        bucket.lost = Lost(None if bucket.wire.intra.traits.lossless else lost.intra, lost.inter)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
