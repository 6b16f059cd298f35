"""All-to-all: between nodes, one row of a tensor to every node; between ranks, any number of rows to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.random import MASK32
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.together import together
from thinwire.errors import ConfigError

# Of each number in front of the rows of a message whose receiver does not know how many they are.
NUMBER_BYTES = 8
# Of the number of a row that travels with it.
ROW_NUMBER_BYTES = 4


def all_to_all_nodes(link: Link, sends: Tensor, *, operation: str = "all_to_all") -> Rounds[Tensor]:
    """Send row y of `sends` to node y, between the ranks that have the same local rank.

    Shape:
        sends: uint8 [num_nodes, bytes].
        result: the same shape, scratch of the link; row y came from node y.
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


def rows_bytes(
    num_rows: int, width: int, dtype: torch.dtype, codec: Codec | None = None, *, tells: bool = False
) -> int:
    """Payload of `num_rows` rows in one message. tells: with their numbers."""
    exact = num_rows * width * dtype.itemsize
    body = exact if codec is None else codec.packet_bytes(num_rows * width)
    return body + tells * ROW_NUMBER_BYTES * num_rows


@dataclass(frozen=True)
class RowCodec:
    """How rows become a packet, and come back; all ranks have the same one.

    Where `width` is a multiple of `codec.block`, groups end at a row's end. What a row draws follows from its number,
    see `Codec.encode_rows`. So it is rounded alike whichever rows it travels with. Of narrower rows, a message is one
    tensor for the codec, whose draws count on from the first row's number.

    codec: None: the rows' own bytes, in their own dtype. tells: numbers travel with their rows, modulo 2^32.
    """

    width: int
    dtype: torch.dtype
    codec: Codec | None = None
    seed: int = 0
    tells: bool = False

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of a packet of `num_rows` rows."""
        return rows_bytes(num_rows, self.width, self.dtype, self.codec, tells=self.tells)

    def pack(self, rows: Tensor, numbers: Tensor, out: Tensor) -> Tensor:
        """Write rows into a packet.

        Args:
            rows: contiguous [k, width].
            numbers: int64 [k], on the CPU, from which a codec draws.
            out: uint8 [num_bytes(k)].
        """
        told, body = self._parts(out, len(rows))
        if self.tells:
            told.view(torch.int32).copy_(numbers)
        if self.codec is None:
            body.copy_(rows.view(-1).view(torch.uint8))
        elif not self.codec.traits.draws:
            self.codec.encode(rows.float(), out=body)
        elif self.width % self.codec.block:
            Codec.encode_rows(self.codec, rows.float(), numbers, seed=self.seed, out=body)
        else:
            self.codec.encode_rows(rows.float(), numbers, seed=self.seed, out=body)
        return out

    def _parts(self, packet: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """The bytes of the numbers of rows in a packet, and of the rows."""
        at = self.tells * ROW_NUMBER_BYTES * num_rows
        return packet[:at], packet[at:]

    def unpack(self, packet: Tensor, out: Tensor, numbers: Tensor) -> None:
        """Fill `out` with the rows of a packet, and `numbers` with theirs if they have travelled.

        Shape:
            packet: uint8 [num_bytes(k)]. out: contiguous [k, width]. numbers: int64 [k], on the CPU.
        """
        told, packet = self._parts(packet, len(out))
        if self.tells:
            numbers.copy_(told.view(torch.int32))
            numbers.bitwise_and_(MASK32)
        flat = out.view(-1)
        if self.codec is None:
            flat.view(torch.uint8).copy_(packet)
        elif out.dtype == torch.float32 and len(flat):
            self.codec.decode(packet, len(flat), out=flat)
        elif len(flat):
            flat.copy_(self.codec.decode(packet, len(flat)))

    def carry(self, rows: Tensor, numbers: Tensor, out: Tensor) -> None:
        """Fill `out` with the rows as if they had travelled."""
        if self.codec is None or not len(rows):
            out.copy_(rows)
            return
        packet = torch.empty(self.num_bytes(len(rows)), dtype=torch.uint8, device=rows.device)
        self.unpack(self.pack(rows, numbers, packet), out, numbers.clone())


@dataclass
class Room:
    """How many rows two ranks expect of each other, by peer: both ends know the same. It grows with what comes."""

    to: dict[int, int] = field(default_factory=dict)
    of: dict[int, int] = field(default_factory=dict)

    def note(self, sent: Sequence[int], came: Sequence[int]) -> None:
        """Rows to and from each rank have travelled."""
        for room, counts in ((self.to, sent), (self.of, came)):
            for peer, count in enumerate(counts):
                room[peer] = max(room.get(peer, 0), count + count // 4)


def all_to_all_rows(
    link: Link,
    rows: Tensor,
    counts: Sequence[int],
    receives: Sequence[int],
    codec: Codec | None = None,
    *,
    seed: int = 0,
    numbers: Tensor | None = None,
    rounds_own: bool = False,
    operation: str = "all_to_all",
) -> Rounds[Tensor]:
    """Send any number of rows to every rank: one message to each, none where there are no rows; see RowCodec.

    Args:
        rows: to rank 0, then to rank 1, and so on; read until the job ends.
        counts: rows to each rank. receives: rows from each rank.
        codec, seed: see RowCodec.
        numbers: int64 [n], on the CPU, of the rows; by default 0, 1, ...
        rounds_own: the rows that stay here are rounded, too.
        operation: name in the meter.

    Shape:
        rows: floating [n, width], n the sum of `counts`, contiguous.
        result: [m, width] in the dtype of `rows`, from rank 0, then from rank 1, and so on.

    Raises ConfigError for counts that do not fit `rows`, the ranks, or `receives`.
    """
    how = RowCodec(rows.shape[1], rows.dtype, codec, seed)
    found, _ = yield from all_to_all_numbered(
        link, rows, counts, receives, how, numbers, rounds_own=rounds_own, operation=operation
    )
    return found


def all_to_all_numbered(
    link: Link, rows: Tensor, counts: Sequence[int], receives: Sequence[int], how: RowCodec,
    numbers: Tensor | None = None, *, rounds_own: bool = False, operation: str = "all_to_all",
) -> Rounds[tuple[Tensor, Tensor]]:  # fmt: skip
    """`all_to_all_rows` that also returns the numbers of the rows that came, int64 [m]; 0 if `how` does not tell."""
    own, blocks = link.rank, _blocks(link, rows, counts)
    if len(receives) != len(counts) or receives[own] != counts[own]:
        raise ConfigError(f"receives {list(receives)} does not fit counts {list(counts)} on rank {own}")
    numbers_to = _numbers(rows, numbers).split(list(counts))
    is_plain = how.codec is None and not how.tells

    def packed(peer: int) -> Tensor:
        if is_plain:
            return blocks[peer].view(-1).view(torch.uint8)
        packet = link.scratch(f"rows to {peer}", how.num_bytes(counts[peer]), device=rows.device)
        return how.pack(blocks[peer], numbers_to[peer], packet)

    result, told = rows.new_empty(sum(receives), rows.shape[1]), torch.zeros(sum(receives), dtype=torch.int64)
    parts, numbers_of = result.split(list(receives)), told.split(list(receives))
    numbers_of[own].copy_(numbers_to[own])
    staying = how if rounds_own else replace(how, codec=None)
    # Rows that travel as they are arrive where they stay.
    room = {
        peer: parts[peer].view(-1).view(torch.uint8)
        if is_plain
        else link.scratch(f"rows from {peer}", how.num_bytes(num_rows), device=rows.device)
        for peer, num_rows in enumerate(receives)
        if num_rows and peer != own
    }
    sends = {peer: partial(packed, peer) for peer, num_rows in enumerate(counts) if num_rows and peer != own}
    stay = partial(staying.carry, blocks[own], numbers_to[own], parts[own])
    yield from _swap(link, sends, room, operation, meanwhile=stay)

    def unpack() -> None:
        for peer, packet in room.items():
            how.unpack(packet, parts[peer], numbers_of[peer])

    if not is_plain:
        yield from link.work("decode_s", operation, unpack)
    return result, told


def all_to_all_counted(
    link: Link, rows: Tensor, counts: Sequence[int], notes: Tensor, room: Room, how: RowCodec,
    numbers: Tensor | None = None, *, rounds_own: bool = False, operation: str = "all_to_all",
) -> Rounds[tuple[Tensor, Tensor, list[int], Tensor]]:  # fmt: skip
    """`all_to_all_numbered` where a rank does not know how many rows come: notes travel in front of them.

    A message has room for as many rows as both ends expect; the rows above that follow in a second message. So rows
    that vary little from step to step take one message. A message carries no rows but those that are there.

    Args:
        notes: int64 [ranks, n], on the CPU; numbers for each rank.
        room: what both ends expect.
        rows, counts, how, numbers, rounds_own, operation: see all_to_all_rows.

    Returns the rows, their numbers, how many came from each rank, and the notes from each rank, [ranks, n]. Raises
    ConfigError for counts that do not fit `rows` or the ranks.
    """
    own, blocks, device = link.rank, _blocks(link, rows, counts), rows.device
    numbers_to = _numbers(rows, numbers).split(list(counts))
    head = NUMBER_BYTES * (1 + notes.shape[1])
    others = [peer for peer in range(len(counts)) if peer != own]
    expected = {peer: room.to.get(peer, 0) for peer in others}

    def noted(message: Tensor) -> Tensor:
        return message[:head].view(torch.int64)

    def length(message: Tensor) -> int:
        return min(message.numel(), head + how.num_bytes(int(noted(message)[0])))

    def first_message(peer: int) -> Tensor:
        fit = min(counts[peer], expected[peer])
        # Both ends name the largest size; only its beginning travels.
        message = link.scratch(f"rows to {peer}", head + how.num_bytes(expected[peer]), device=device)
        noted(message).copy_(torch.tensor([counts[peer], *notes[peer].tolist()]))
        how.pack(blocks[peer][:fit], numbers_to[peer][:fit], message[head : head + how.num_bytes(fit)])
        return message

    def second_message(peer: int) -> Tensor:
        rest = blocks[peer][expected[peer] :]
        packet = link.scratch(f"more rows to {peer}", how.num_bytes(len(rest)), device=device)
        return how.pack(rest, numbers_to[peer][expected[peer] :], packet)

    begun = {
        peer: link.scratch(f"rows from {peer}", head + how.num_bytes(room.of.get(peer, 0)), device=device)
        for peer in others
    }
    stays = blocks[own]
    stay: Callable[[], None] | None = None
    if rounds_own:
        stays = torch.empty_like(stays)
        stay = partial(how.carry, blocks[own], numbers_to[own], stays)
    firsts = {peer: partial(first_message, peer) for peer in others}
    yield from _swap(link, firsts, begun, operation, length, meanwhile=stay)
    came, theirs = list(counts), notes.clone()
    for peer, message in begun.items():
        count, *told = noted(message).tolist()
        came[peer], theirs[peer] = count, torch.tensor(told)
    there = {peer: min(came[peer], room.of.get(peer, 0)) for peer in others}
    rest = {
        peer: link.scratch(f"more rows from {peer}", how.num_bytes(came[peer] - there[peer]), device=device)
        for peer in others
        if came[peer] > there[peer]
    }
    late = {peer: partial(second_message, peer) for peer in others if counts[peer] > expected[peer]}
    # Without any, too: a job that goes on among other ranks must be in the same round on all.
    yield from _swap(link, late, rest, operation)
    room.note(counts, came)
    result, told_numbers = rows.new_empty(sum(came), rows.shape[1]), torch.zeros(sum(came), dtype=torch.int64)

    def unpack() -> None:
        for peer, (out, told) in enumerate(zip(result.split(came), told_numbers.split(came), strict=True)):
            if peer == own:
                out.copy_(stays)
                told.copy_(numbers_to[own])
                continue
            fit = there[peer]
            how.unpack(begun[peer][head : head + how.num_bytes(fit)], out[:fit], told[:fit])
            if peer in rest:
                how.unpack(rest[peer], out[fit:], told[fit:])

    yield from link.work("decode_s", operation, unpack)
    return result, told_numbers, came, theirs


def _numbers(rows: Tensor, numbers: Tensor | None) -> Tensor:
    return torch.arange(len(rows)) if numbers is None else numbers


def _blocks(link: Link, rows: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """The rows to each rank. Raises ConfigError for counts that do not fit."""
    num_ranks = link.topology.world_size
    if len(counts) != num_ranks or sum(counts) != len(rows) or not rows.is_contiguous():
        raise ConfigError(f"counts {list(counts)} must cut {len(rows)} contiguous rows for {num_ranks} ranks")
    return rows.split(list(counts))


def _swap(
    link: Link,
    sends: Mapping[int, Callable[[], Tensor]],
    room: Mapping[int, Tensor],
    operation: str,
    length: Callable[[Tensor], int] = Tensor.numel,
    *,
    meanwhile: Callable[[], None] | None = None,
) -> Rounds[None]:
    """Make a message for each of some ranks and send it, and fill the room with those of others.

    meanwhile: what is done once all messages have left.
    """
    num_ranks, near = link.topology.world_size, set(link.local_peers())
    peers = [(link.rank + step) % num_ranks for step in range(1, num_ranks)]
    # Those for other nodes leave first: they take the longest.
    levels = {"inter": [p for p in peers if p not in near], "intra": [p for p in peers if p in near]}
    exchanges = {
        level: link.exchange(operation, level, {peer: room[peer] for peer in members if peer in room}, length)
        for level, members in levels.items()
        if members
    }
    for level, members in levels.items():
        for peer in members:
            if peer in sends:
                packet = yield from link.work("encode_s", operation, sends[peer])
                exchanges[level].send(peer, packet)
    if meanwhile is not None:
        yield from link.work("encode_s", operation, meanwhile)
    yield from together(*(exchange.finish() for exchange in exchanges.values()))
