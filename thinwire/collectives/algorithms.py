"""The third noun: who sends which packet to whom, in what order, and in which precision the sum is taken.

Generators over a Link, driven by the communication thread, which goes on with another job while one waits for its
messages. Packets lie where the tensors do, on the CPU or a CUDA device. Every sum is taken in fp32 in rank order, so
results do not depend on which message arrives first. A caller's tensor is written only after all messages of the
operation have arrived.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity, derive_seed, paired_seed
from thinwire.collectives import staging
from thinwire.collectives.exchange import ROUNDS_OF_A_PART, Exchange, Wire
from thinwire.collectives.rounds import Arrival, Computed, Rounds
from thinwire.collectives.topology import Topology
from thinwire.errors import CorruptMessageError

HOP_INTRA, HOP_INTER = 1, 2
# Messages from here on may cross between nodes in turns, of which there are so many at most.
LARGE_BYTES, MAX_TURNS = 1 << 18, 4
T = TypeVar("T")


@dataclass
class Link:
    """What one job needs: the wire, the grid, its number among the jobs of the group, and scratch memory.

    The memory is reused from job to job, but never by two that are under way at once. pool: threads that pack and
    unpack tensors of the CPU in the communication thread's place.
    """

    wire: Wire
    topology: Topology
    number: int
    memory: dict[str, Tensor]
    prefix: str = ""
    # The job's rounds are numbered through, also where some of them run among other ranks.
    rounds: Iterator[int] = field(default_factory=itertools.count)
    # What the meter calls the level inside a node.
    inside: str = "intra"
    pool: Executor | None = None

    @property
    def rank(self) -> int:
        return self.wire.rank

    @property
    def node(self) -> int:
        return self.topology.node(self.wire.rank)

    @property
    def local_rank(self) -> int:
        return self.topology.local_rank(self.wire.rank)

    def node_peers(self) -> list[int]:
        """The other nodes' ranks with this rank's local rank, nearest next node first."""
        grid = self.topology
        return [grid.rank((self.node + step) % grid.num_nodes, self.local_rank) for step in range(1, grid.num_nodes)]

    def local_peers(self) -> list[int]:
        """The other ranks of this node, next one first."""
        grid = self.topology
        return [grid.rank(self.node, (self.local_rank + step) % grid.local_size) for step in range(1, grid.local_size)]

    def scratch(
        self, name: str, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device = staging.CPU
    ) -> Tensor:
        """A tensor with undefined content that lives until the same name is asked for again."""
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        held = self.memory.get(self.prefix + name)
        if held is None or held.numel() < num_bytes or held.device != device:
            held = self.memory[self.prefix + name] = staging.allocate(num_bytes, device)
        return held[:num_bytes].view(dtype).view(shape)

    def part(self, number: int) -> Link:
        """A link for part 0, 1, ... of this job, with messages and memory of its own; see `together`."""
        rounds = itertools.count((number + 1) * ROUNDS_OF_A_PART)
        return replace(self, prefix=f"{self.prefix}{number}.", rounds=rounds)

    def exchange(
        self, operation: str, level: str, receives: Mapping[int, Tensor], length: Callable[[Tensor], int] = Tensor.numel
    ) -> Exchange:
        """Open the job's next round of messages; see Exchange."""
        level = self.inside if level == "intra" else level
        number = next(self.rounds)
        return Exchange(self.wire, self.number, number, operation, level, receives, length, self.scratch)

    def among(self, members: Sequence[int], inside: str = "intra") -> Link:
        """The link as some of the ranks see it: a collective over it is one of theirs alone, slices in their order.

        Every rank belongs to one such group, all groups are alike, and all of them run the same collective.
        """
        grid = self.topology.among(members)
        return replace(self, wire=self.wire.among(members), topology=grid, inside=inside)

    def timed(self, kind: str, operation: str) -> AbstractContextManager[None]:
        """Count a block's seconds; see Meter."""
        return self.wire.meter.timed(kind, f"{operation} {self.number}")

    def work(self, kind: str, operation: str, task: Callable[[], T]) -> Rounds[T]:
        """The task's result, its seconds counted: done at once, or on the pool while other jobs go on."""

        def timed() -> T:
            with self.timed(kind, operation):
                return task()

        if self.pool is None:
            return timed()
        future = self.pool.submit(timed)
        yield [Computed(future)]
        return future.result()


class Feedback(Protocol):
    """Error feedback of a sum: packs its pieces in the codecs' place, and remembers what they lose.

    is_rotated: a piece may come in the coordinates in which its codec rotates, where the hop before left it there.
    """

    @property
    def is_rotated(self) -> bool: ...

    def encode(
        self, codec: Codec, x: Tensor, piece: tuple[int, int], *, seed: int, counter: int, out: Tensor
    ) -> Tensor:
        """Pack `x` and what was lost of this piece before; piece: (hop, rank or node that it is for)."""
        ...


@dataclass(frozen=True)
class Lost:
    """What the codecs of a sum lost on this rank, in units of the sum: it is added to the next one (error feedback).

    A hop that was given x sends C(x + lost) and leaves lost <- x + lost - C(x + lost), in place, so that
        sum of the totals + sum over ranks of what is lost = sum of what was put in.
    For slices of n elements, fp32: intra [num_nodes, local_size, n], of this rank's tensor on its way inside the node;
    inter [num_nodes, n], of its node's sums, between nodes; gather [n], of the total that it owns, on the way to all.
    None: not fed back. It is written while messages travel: after an error it is worth nothing.
    """

    intra: Tensor | None = None
    inter: Tensor | None = None
    gather: Tensor | None = None

    @property
    def is_rotated(self) -> bool:
        """What is owed between nodes is told in the gradient's own coordinates."""
        return self.inter is None

    def encode(
        self, codec: Codec, x: Tensor, piece: tuple[int, int], *, seed: int, counter: int, out: Tensor
    ) -> Tensor:
        """See Feedback."""
        hop, number = piece
        held = self.inter if hop == HOP_INTER else None if self.intra is None else self.intra.flatten(0, 1)
        return encode_with(codec, x, None if held is None else held[number], seed, counter, out)

    @classmethod
    def zeros(cls, grid: Topology, num_elements: int, device: torch.device = staging.CPU) -> Lost:
        """Nothing lost yet of slices of `num_elements`, on the hops that this grid has."""
        return cls(
            torch.zeros(grid.num_nodes, grid.local_size, num_elements, device=device) if grid.local_size > 1 else None,
            torch.zeros(grid.num_nodes, num_elements, device=device) if grid.num_nodes > 1 else None,
            torch.zeros(num_elements, device=device),
        )

    def by_slices(self, grid: Topology, rank: int) -> Tensor:
        """All of it in the elements' own places, fp32 [num_nodes, local_size, n]."""
        held = next(t for t in (self.gather, self.inter, self.intra) if t is not None)
        num_elements, device = held.shape[-1], held.device
        node, local_rank = grid.node(rank), grid.local_rank(rank)
        whole = torch.zeros(grid.num_nodes, grid.local_size, num_elements, device=device)
        if self.intra is not None:
            whole.add_(self.intra)
        if self.inter is not None:
            whole[:, local_rank].add_(self.inter)
        if self.gather is not None:
            whole[node, local_rank].add_(self.gather)
        return whole

    def places(self, grid: Topology, rank: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """Where its elements lie, in runs: (tensor, first element in it, that one's place in all slices, length)."""
        if self.intra is not None:
            yield self.intra, 0, 0, self.intra.numel()
        if self.inter is not None:
            n = self.inter.shape[-1]
            for node in range(grid.num_nodes):
                yield self.inter, node * n, grid.rank(node, grid.local_rank(rank)) * n, n
        if self.gather is not None:
            n = self.gather.shape[-1]
            yield self.gather, 0, rank * n, n

    def owe(self, owed: Tensor, grid: Topology, rank: int) -> None:
        """Be this rank's part of a debt of all: the mean over ranks of `by_slices` is `owed`, in any shape."""
        owed = owed.view(grid.num_nodes, grid.local_size, -1)
        node, local_rank = grid.node(rank), grid.local_rank(rank)
        for tensor in (self.intra, self.inter, self.gather):
            if tensor is not None:
                tensor.zero_()
        if self.intra is not None:
            self.intra.copy_(owed)
        elif self.inter is not None:
            self.inter.copy_(owed[:, local_rank]).mul_(grid.local_size)
        elif self.gather is not None:
            self.gather.copy_(owed[node, local_rank]).mul_(grid.world_size)


def together(*jobs: Rounds[Any]) -> Rounds[list[Any]]:
    """Run parts of one job side by side, each on a `Link.part` of its own; their results.

    While the messages of one travel, the next one packs. What they compute on a pool it computes at once, and each goes
    on when its own is ready, in the order in which they asked.
    """
    results: list[Any] = [None] * len(jobs)
    waiting: dict[int, Sequence[Arrival]] = {}

    def advance(number: int) -> None:
        waiting.pop(number, None)
        try:
            waiting[number] = next(jobs[number])
        except StopIteration as end:
            results[number] = end.value

    for number in range(len(jobs)):
        advance(number)
    while waiting:
        computing = [n for n, awaited in waiting.items() if any(isinstance(one, Computed) for one in awaited)]
        ready = computing[:1] or list(waiting)
        if awaited := [arrival for number in ready for arrival in waiting[number]]:
            yield awaited
        for number in ready:
            advance(number)
    return results


def encode_with(codec: Codec, x: Tensor, lost: Tensor | None, seed: int, counter: int, out: Tensor) -> Tensor:
    """out = C(x), or with error feedback out = C(x + lost) and lost <- x + lost - C(x + lost)."""
    if lost is None:
        return codec.encode(x, seed=seed, counter=counter, out=out)
    codec.encode(lost.add_(x), seed=seed, counter=counter, out=out)
    lost.sub_(codec.decode(out, x.numel()))
    return out


def added(*sent: Mapping[str, int]) -> dict[str, int]:
    """Bytes by level, added up."""
    return {level: sum(one[level] for one in sent) for level in ("intra", "inter")}


def gather_bytes(grid: Topology, packet_bytes: int) -> dict[str, int]:
    """What one rank sends on each level in `all_gather_packets`."""
    intra = (grid.local_size - 1) * grid.num_nodes * packet_bytes
    return {"intra": intra, "inter": (grid.num_nodes - 1) * packet_bytes}


def reduce_bytes(grid: Topology, num_elements: int, intra: Codec, inter: Codec) -> dict[str, int]:
    """What one rank sends on each level in `reduce_scatter`; num_elements: of its slice."""
    to_neighbours = (grid.local_size - 1) * grid.num_nodes * intra.packet_bytes(num_elements)
    return {"intra": to_neighbours, "inter": (grid.num_nodes - 1) * inter.packet_bytes(num_elements)}


def all_gather_packets(
    link: Link,
    packet: Tensor,
    operation: str = "all_gather",
    length: Callable[[Tensor], int] = Tensor.numel,
    *,
    in_turns: bool = False,
) -> Rounds[Tensor]:
    """Every rank's packet on every rank: uint8 [local_size, num_nodes, bytes], scratch of the link.

    Entry [i, y] comes from rank y * local_size + i. Packets cross between nodes once, then spread inside each node,
    so a node receives (num_nodes - 1) * local_size packets from outside and each rank sends world_size - 1 in all.
    Between nodes a packet is cut to its `length`. in_turns: see gather_across_nodes.
    """
    grid = link.topology
    gathered = link.scratch("gathered", grid.local_size, grid.num_nodes, packet.numel(), device=packet.device)
    if packet.numel() == 0:
        return gathered
    yield from gather_across_nodes(link, packet, gathered[link.local_rank], operation, length, in_turns=in_turns)
    yield from gather_inside_node(link, gathered, operation)
    return gathered


def gather_across_nodes(
    link: Link,
    packet: Tensor,
    column: Tensor,
    operation: str,
    length: Callable[[Tensor], int] = Tensor.numel,
    *,
    in_turns: bool = False,
) -> Rounds[None]:
    """The first half of all_gather_packets: fill `column`, uint8 [num_nodes, bytes], from the ranks of this local rank.

    Together the columns of a node's ranks hold the packets of all ranks, so a node that keeps them needs nothing from
    outside to gather the same packets again. in_turns: a large packet goes to few nodes at a time, for a job that is
    under way alone: where several streams meet at one node they lose packets, and half of its rate. One that comes
    damaged is told when all have come, so that every rank ends in the same round.
    """
    column[link.node].copy_(packet)
    targets, sources = link.node_peers(), link.node_peers()[::-1]
    is_cut = in_turns and packet.numel() >= LARGE_BYTES
    at_once = -(-len(targets) // MAX_TURNS) if is_cut else len(targets)
    damaged: CorruptMessageError | None = None
    for first in range(0, len(targets), max(at_once, 1)):
        turn = slice(first, first + at_once)
        receives = {peer: column[link.topology.node(peer)] for peer in sources[turn]}
        round_ = link.exchange(operation, "inter", receives, length)
        for peer in targets[turn]:
            round_.send(peer, column[link.node])
        try:
            yield from round_.finish()
        except CorruptMessageError as error:
            damaged = error
    if damaged is not None:
        raise damaged


def gather_inside_node(link: Link, gathered: Tensor, operation: str) -> Rounds[None]:
    """The second half: fill uint8 [local_size, num_nodes, bytes], in which this rank's column is, from the node."""
    if link.topology.local_size > 1:
        own = gathered[link.local_rank].view(-1)
        receives = {peer: gathered[link.topology.local_rank(peer)].view(-1) for peer in link.local_peers()}
        round_ = link.exchange(operation, "intra", receives)
        for peer in receives:
            round_.send(peer, own)
        yield from round_.finish()


def all_gather(
    link: Link,
    shard: Tensor,
    codec: Codec,
    *,
    seed: int = 0,
    counter: int = 0,
    operation: str = "all_gather",
    lost: Tensor | None = None,
) -> Rounds[Tensor]:
    """All ranks' shards after the codec: fp32 [world_size, n] in rank order, equal on every rank, owner included.

    `counter` numbers the first element of the shard for the codec's randomness. lost: see Lost.gather.
    """
    grid, num_elements = link.topology, shard.numel()
    packet = link.scratch("shard", codec.packet_bytes(num_elements), device=shard.device)
    pack = partial(encode_with, codec, shard.view(-1), lost, derive_seed(seed, link.rank), counter, packet)
    yield from link.work("encode_s", operation, pack)
    gathered = yield from all_gather_packets(link, packet, operation, codec.length)

    def unpack() -> Tensor:
        out = torch.empty(grid.world_size, num_elements, device=shard.device)
        for rank in range(grid.world_size):
            codec.decode(gathered[grid.local_rank(rank), grid.node(rank)], num_elements, out=out[rank])
        return out

    return (yield from link.work("decode_s", operation, unpack))


def reduce_scatter(
    link: Link,
    x: Tensor,
    intra: Codec,
    inter: Codec,
    *,
    seed: int = 0,
    counter: int = 0,
    operation: str = "reduce_scatter",
    lost: Feedback | None = None,
) -> Rounds[Tensor]:
    """This rank's slice of the sum over ranks of flat fp32 `x`: fp32 [n / world_size], scratch of the link.

    Slice j of `x` belongs to rank j = y * local_size + i. Hop 1, inside the node: the num_nodes slices of local rank i
    travel with `intra` to local rank i, which adds local_size pieces in fp32. Hop 2, between nodes: each partial sum
    travels with `inter` to its owner, which adds num_nodes pieces. With one rank to a node, or one node, the hop that
    has no partner is left out. Where both codecs rotate alike, the sums stay rotated and are rotated back once.
    `counter` numbers the first element of `x` for the codecs' randomness. Draws differ by rank in hop 1 and by node in
    hop 2, so the sum does not depend on which rank owns an element; neighbours draw opposite noise, which halves what
    the sum loses (see paired_seed). With `lost`, each hop feeds back what its codec lost the last time.

    Source: SDP4Bit, NeurIPS 2024, two-level gradient reduction with Hadamard smoother.
    """
    grid = link.topology
    num_elements = x.numel() // grid.world_size
    slices = x.view(grid.num_nodes, grid.local_size, num_elements)
    if grid.world_size == 1 or num_elements == 0:
        return x.view(-1)
    rotation = None
    sums = slices[:, 0]
    counters = [
        [counter + (y * grid.local_size + i) * num_elements for i in range(grid.local_size)]
        for y in range(grid.num_nodes)
    ]
    if grid.local_size > 1:
        own_seed = paired_seed(derive_seed(seed, HOP_INTRA), link.rank)
        sums = yield from _hop_intra(link, slices, intra, own_seed, counters, operation, lost)
        rotation = intra.rotation
    if grid.num_nodes > 1:
        if rotation and (not _rotate_alike(intra, inter) or (lost and not lost.is_rotated)):
            rotation.rotate_(sums.view(-1))
            rotation = None
        codec = _in_rotated_domain(inter) if rotation else inter
        node_counters = [row[link.local_rank] for row in counters]
        own_seed = paired_seed(derive_seed(seed, HOP_INTER), link.node)
        sums = yield from _hop_inter(link, sums, codec, own_seed, node_counters, operation, lost)
        rotation = inter.rotation
    with link.timed("decode_s", operation):
        return rotation.rotate_(sums.view(-1)) if rotation else sums.view(-1)


def reduce_in_node(link: Link, x: Tensor, *, operation: str = "reduce_scatter") -> Rounds[Tensor]:
    """This local rank's slice of the sum over its node of flat fp32 `x`: fp32 [n / local_size], scratch of the link."""
    grid = link.topology
    slices = x.view(1, grid.local_size, -1)
    if grid.local_size == 1 or x.numel() == 0:
        return slices[0, 0]
    total = yield from _hop_intra(link, slices, Identity(), 0, [[0] * grid.local_size], operation, None)
    return total[0]


def all_to_all_nodes(link: Link, sends: Tensor, *, operation: str = "all_to_all") -> Rounds[Tensor]:
    """Row y of uint8 `sends` [num_nodes, bytes] to node y, between ranks of one local rank; scratch of the link.

    Row y of the result, of the same shape, came from node y.
    """
    received = link.scratch("exchanged", *sends.shape)
    received[link.node].copy_(sends[link.node])
    if link.topology.num_nodes > 1 and sends.numel():
        receives = {peer: received[link.topology.node(peer)] for peer in link.node_peers()}
        round_ = link.exchange(operation, "inter", receives)
        for peer in receives:
            round_.send(peer, sends[link.topology.node(peer)])
        yield from round_.finish()
    return received


def _hop_intra(
    link: Link,
    slices: Tensor,
    codec: Codec,
    seed: int,
    counters: list[list[int]],
    operation: str,
    lost: Feedback | None,
) -> Rounds[Tensor]:
    """Sum over the node, rotated: fp32 [num_nodes, n], the partial sums of this local rank's slices."""
    num_nodes, local_size, num_elements = slices.shape
    packet_bytes = codec.packet_bytes(num_elements)
    device = slices.device
    sends = link.scratch("intra_send", local_size, num_nodes, packet_bytes, device=device)
    receives = link.scratch("intra_receive", local_size, num_nodes, packet_bytes, device=device)
    total = link.scratch("intra_sum", num_nodes, num_elements, dtype=torch.float32, device=device)
    grid = link.topology
    buffers = {peer: receives[grid.local_rank(peer)].view(-1) for peer in link.local_peers()}

    def pack(i: int) -> None:
        for y in range(num_nodes):
            piece = (HOP_INTRA, grid.rank(y, i))
            _encode(codec, lost, slices[y, i], piece, seed, counters[y][i], sends[i, y])

    round_ = link.exchange(operation, "intra", buffers)
    for peer in [*link.local_peers(), link.rank]:
        i = grid.local_rank(peer)
        yield from link.work("encode_s", operation, partial(pack, i))
        if peer != link.rank:
            round_.send(peer, sends[i].view(-1))
    yield from round_.finish()

    inner = _in_rotated_domain(codec)

    def add_up() -> None:
        for i in range(local_size):
            packets = sends[i] if i == link.local_rank else receives[i]
            for y in range(num_nodes):
                _accumulate(inner, packets[y], total[y], first=i == 0)

    yield from link.work("decode_s", operation, add_up)
    return total


def _hop_inter(
    link: Link,
    sums: Tensor,
    codec: Codec,
    seed: int,
    counters: list[int],
    operation: str,
    lost: Feedback | None,
) -> Rounds[Tensor]:
    """Sum over the nodes, rotated: fp32 [n], this rank's slice."""
    num_nodes, num_elements = sums.shape
    packet_bytes = codec.packet_bytes(num_elements)
    device = sums.device
    sends = link.scratch("inter_send", num_nodes, packet_bytes, device=device)
    receives = link.scratch("inter_receive", num_nodes, packet_bytes, device=device)
    total = link.scratch("inter_sum", num_elements, dtype=torch.float32, device=device)
    grid = link.topology
    buffers = {peer: receives[grid.node(peer)] for peer in link.node_peers()}
    round_ = link.exchange(operation, "inter", buffers, codec.length)
    for peer in [*link.node_peers(), link.rank]:
        y = grid.node(peer)
        pack = partial(_encode, codec, lost, sums[y], (HOP_INTER, y), seed, counters[y], sends[y])
        yield from link.work("encode_s", operation, pack)
        if peer != link.rank:
            round_.send(peer, sends[y])
    yield from round_.finish()

    inner = _in_rotated_domain(codec)

    def add_up() -> None:
        for y in range(num_nodes):
            _accumulate(inner, sends[y] if y == link.node else receives[y], total, first=y == 0)

    yield from link.work("decode_s", operation, add_up)
    return total


def _in_rotated_domain(codec: Codec) -> Codec:
    """What decodes to rotated values, where the codec rotates; else the codec."""
    return codec.rotation.inner if codec.rotation else codec


def _rotate_alike(one: Codec, other: Codec) -> bool:
    """Whether both codecs rotate, and by the same matrix."""
    a, b = one.rotation, other.rotation
    return a is not None and b is not None and a.block_size == b.block_size


def _encode(
    codec: Codec, lost: Feedback | None, x: Tensor, piece: tuple[int, int], seed: int, counter: int, out: Tensor
) -> None:
    if lost is None:
        codec.encode(x, seed=seed, counter=counter, out=out)
    else:
        lost.encode(codec, x, piece, seed=seed, counter=counter, out=out)


def _accumulate(codec: Codec, packet: Tensor, total: Tensor, *, first: bool) -> None:
    if first:
        codec.decode(packet, total.numel(), out=total)
    else:
        codec.decode_add(packet, total)


def all_reduce(
    link: Link,
    x: Tensor,
    intra: Codec,
    inter: Codec,
    gather: Codec,
    *,
    seed: int = 0,
    operation: str = "all_reduce",
    lost: Lost | None = None,
) -> Rounds[Tensor]:
    """The sum over ranks of `x`, fp32 in its shape, equal on every rank: reduce_scatter, then all_gather.

    lost: for slices of `slice_length` elements.
    """
    world_size = link.topology.world_size
    if world_size == 1:
        return x.float().clone()
    length = slice_length(x.numel(), world_size, intra, inter, gather)
    padded = torch.zeros(world_size * length, device=x.device)
    padded[: x.numel()].copy_(x.reshape(-1))
    shard = yield from reduce_scatter(link, padded, intra, inter, seed=seed, operation=operation, lost=lost)
    own = lost.gather if lost is not None else None
    total = yield from all_gather(link, shard, gather, seed=seed, operation=operation, lost=own)
    return total.view(-1)[: x.numel()].view(x.shape)


def slice_length(num_elements: int, world_size: int, *codecs: Codec) -> int:
    """Elements of each rank's slice of a tensor that zeros fill up to where the codecs can cut it."""
    block = lcm(*(codec.block for codec in codecs))
    return -(-num_elements // (world_size * block)) * block


def all_reduce_bytes(num_elements: int, grid: Topology, intra: Codec, inter: Codec, gather: Codec) -> dict[str, int]:
    """What one rank sends on each level in `all_reduce`."""
    n = slice_length(num_elements, grid.world_size, intra, inter, gather)
    return added(reduce_bytes(grid, n, intra, inter), gather_bytes(grid, gather.packet_bytes(n)))


def broadcast_(link: Link, x: Tensor, source: int) -> Rounds[Tensor]:
    """Overwrite contiguous `x` on every rank with rank `source`'s bits: across nodes first, then inside each node."""
    if link.topology.world_size == 1 or x.numel() == 0:
        return x
    grid = link.topology
    message = x.view(-1).view(torch.uint8)
    received = link.scratch("broadcast", message.numel(), device=x.device)
    held = message if link.rank == source else received
    for level in ("inter", "intra"):
        if level == "inter":
            column = link.local_rank == grid.local_rank(source)
            senders_peers = link.node_peers() if link.rank == source else []
            receives = {source: received} if column and link.rank != source else {}
        else:
            leader = grid.rank(link.node, grid.local_rank(source))
            senders_peers = link.local_peers() if link.rank == leader else []
            receives = {leader: received} if link.rank != leader else {}
        round_ = link.exchange("broadcast", level, receives)
        for peer in senders_peers:
            round_.send(peer, held)
        yield from round_.finish()
    if held is received:
        message.copy_(received)
    return x


def all_gather_exact(link: Link, x: Tensor) -> Rounds[Tensor]:
    """The raw bits of every rank's `x`, stacked in rank order: [world_size, *x.shape] in x's dtype."""
    grid = link.topology
    packet = x.contiguous().view(-1).view(torch.uint8)
    gathered = yield from all_gather_packets(link, packet, "all_gather_exact")
    return gathered.transpose(0, 1).reshape(-1).view(x.dtype).view(grid.world_size, *x.shape).clone()
