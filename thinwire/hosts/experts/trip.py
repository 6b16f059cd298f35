"""Sends the rows of one layer to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, derive_seed
from thinwire.codecs.random import MASK32
from thinwire.collectives import Communicator
from thinwire.collectives.all_to_all import Room, RowCodec, all_to_all_counted, all_to_all_numbered
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.two_hops import Rooms, all_to_all_two_hops
from thinwire.methods.experts import ExpertPlacement
from thinwire.models.order import Order

T = TypeVar("T")


@dataclass
class ExpertWire:
    """The ranks that share the experts of a layer, and the codecs of the rows that they exchange. Its jobs are urgent.

    Attributes:
        members: the ranks of `comm` between which rows travel.
        placement: which experts each member has.
        first, step: member i is number first + i step among all ranks that train the model.
        seed: of the codecs. Every forward uses the same seed, so that a recomputed forward gives the same result. Each
            message of gradients uses another, counted in `num_drawn`. Randomness depends on the seed and on the rows'
            numbers only, see `row_numbers`.
        hops: state for rows that go inside a node first; None: rows go straight to their rank.
        num_chunks, num_back: messages to each rank in forward and in backward; one number divides the other.
        between: is called in each backward once all gradients of a layer's outputs have come, and none has left.
    """

    comm: Communicator
    placement: ExpertPlacement
    members: Sequence[int]
    dispatch: Codec | None = None
    combine: Codec | None = None
    gradients: Codec | None = None
    weights: Codec | None = None
    first: int = 0
    step: int = 1
    seed: int = 0
    num_drawn: int = 0
    hops: Sequence[Rooms] = ()
    room: Room = field(default_factory=Room)
    num_chunks: int = 1
    num_back: int = 1
    between: Callable[[], None] | None = None

    def forward_seed(self, way: int) -> int:
        """Seed of a forward's codec, on the way to the experts (0) or back (1)."""
        return derive_seed(self.seed, 0, way)

    def draw(self) -> int:
        """Seed for the gradients of one exchange, the same on all ranks."""
        self.num_drawn += 1
        return derive_seed(self.seed, self.num_drawn)

    @property
    def tells(self) -> bool:
        """Whether rows travel to their experts with their numbers, which round what comes back."""
        return draws(self.combine, self.gradients)

    def own_tokens(self, num_tokens: int) -> Tensor:
        """Numbers of this rank's tokens, int64, if each rank that trains the model has as many, in the ranks' order."""
        return self.own_number * num_tokens + torch.arange(num_tokens)

    def row_numbers(self, order: Order, tokens: Tensor) -> Tensor | None:
        """Numbers of the rows of an order, int64 [rows], on the CPU: token E + expert, modulo 2^32.

        tokens: int64, the number of each of this rank's tokens in the global batch. None where no codec draws.
        """
        if not draws(self.dispatch, self.combine, self.gradients):
            return None
        experts = torch.arange(len(order.counts)).repeat_interleave(order.counts.cpu())
        return tokens.cpu()[order.tokens.cpu()] * len(order.counts) + experts & MASK32

    @property
    def own_number(self) -> int:
        """Number of this rank among all ranks that train the model."""
        return self.first + self.members.index(self.comm.rank) * self.step

    def submit(self, job: Callable[[Link], Rounds[T]]) -> Future[T]:
        """Start a job among the members."""
        return self.comm.submit(lambda link: job(link.subgroup(self.members)), urgent=True)


def draws(*codecs: Codec | None) -> bool:
    """Whether any of some codecs rounds at random."""
    return any(codec is not None and codec.traits.draws for codec in codecs)


@dataclass
class RowMessage:
    """Rows that travel together, and the chunks on which experts work one after the other.

    Attributes:
        came: rows received from each rank.
        orders: for each chunk in the message, the places of its rows in it, sorted by expert.
        back: the inverse of all `orders` together.
    """

    came: list[int]
    orders: list[Tensor]
    back: Tensor


class Trip:
    """The rows of one layer in one forward, sorted by expert, and their gradients.

    Each of N chunks has an equal share of the consecutive rows from each rank to each other rank: of n rows, chunk c
    has those from c n // N on. Chunks cut the rows of an expert, so neither rounding nor the number of bytes depends on
    N. While experts work on one chunk, the next ones arrive and earlier ones return. Rows travel in as many messages in
    forward as `wire.num_chunks` says, and in backward as `wire.num_back` does; the larger number is that of chunks, of
    which a message then has several.

    counts: this rank's rows for each expert. numbers: int64 [n], of the rows, see ExpertWire; by default 0, 1, ...

    Attributes:
        num_chunks: N.
        chunk_counts: of each chunk, the rows for each expert of this rank, int64 [experts of a rank].
    """

    def __init__(self, wire: ExpertWire, counts: Tensor, numbers: Tensor | None = None) -> None:
        self.wire, placement = wire, wire.placement
        self.counts = counts.cpu().view(placement.teams, placement.each)
        self.blocks: list[int] = self.counts.sum(1).tolist()
        self.starts = [0, *accumulate(self.blocks)]
        self.num_chunks = max(wire.num_chunks, wire.num_back)
        self.chunk_counts: list[Tensor] = []
        # By the number of messages.
        self._messages: dict[int, list[RowMessage]] = {}
        self._num = wire.num_chunks
        self._numbers = torch.arange(self.starts[-1]) if numbers is None else numbers
        # By message to this rank's experts: the numbers of its rows.
        self._told: dict[int, Tensor] = {}
        # Rows and their numbers.
        self._under_way: dict[int, Future[tuple[Tensor, Tensor]]] = {}
        # By message: what came of it, and what experts have made of its chunks.
        self._here: dict[int, Tensor] = {}
        self._made: dict[int, dict[int, Tensor]] = {}
        self._seed_of_gradients: int | None = None

    def through(self, rows: Tensor, work: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Send rows [n, width] to their experts and return the results.

        work: (rows on this rank, sorted by expert; their counts) -> the experts' outputs.
        """
        back = []
        for number, token in enumerate(Depart.apply(self, rows)):
            there = Arrive.apply(self, number, token)
            back.append(Return.apply(self, number, work(there, self.chunk_counts[number].to(rows.device))))
        return Collect.apply(self, *back)

    def depart(self, rows: Tensor) -> None:
        """Start to send rows [n, width] of all experts to their ranks.

        Waits only for the first chunk, whose message says how many rows come.
        """
        wire, placement = self.wire, self.wire.placement
        notes = self.counts.repeat_interleave(placement.slices, 0)
        sends, counts, numbers = self._to_teams(rows, 0)
        how, name = RowCodec(sends.shape[1], sends.dtype, wire.dispatch, wire.forward_seed(0), wire.tells), "dispatch"

        def job(link: Link) -> Rounds[tuple[Tensor, Tensor, list[int], Tensor]]:
            if wire.hops:
                return all_to_all_two_hops(link, sends, counts, notes, wire.hops[0], how, numbers, operation=name)
            return all_to_all_counted(
                link, sends, counts, notes, wire.room, how, numbers, rounds_own=True, operation=name
            )

        found, told, _, their_counts = wire.comm.wait(wire.submit(job))
        self._note(their_counts.cumsum(1), rows.device)
        self._under_way[0] = Future()
        self._under_way[0].set_result((found, told))
        for number, message in list(enumerate(self._messages[self._num]))[1:]:
            sends, counts, numbers = self._to_teams(rows, number)
            self._under_way[number] = self._exchange(number, sends, counts, message.came, numbers, how, name)

    def arrive(self, number: int) -> Tensor:
        """The received rows of a chunk, [m, width], sorted by expert, or the gradients of their outputs."""
        at, place, message = self._place(number)
        if at not in self._here:
            self._here[at], told = self.wire.comm.wait(self._under_way.pop(at))
            # Gradients come without.
            self._told.setdefault(at, told)
        # Of the last of its chunks nothing else is read.
        is_last = len(self._made.get(at, ())) == len(message.orders) - 1
        came = self._here.pop(at) if is_last else self._here[at]
        return came.index_select(0, message.orders[place])

    def go_back(self, number: int, rows: Tensor, *, is_backward: bool) -> None:
        """Take rows of this rank's experts; with a message's last chunk, start to send them where they came from."""
        at, place, message = self._place(number)
        made = self._made.setdefault(at, {})
        made[place] = rows
        if len(made) < len(message.orders):
            return
        del self._made[at]
        wire, codec, seed, name = self.wire, self.wire.combine, self.wire.forward_seed(1), "combine"
        if is_backward:
            # The same for all chunks.
            self._seed_of_gradients = self._seed_of_gradients or wire.draw()
            codec, seed, name = wire.gradients, self._seed_of_gradients, "dispatch_gradients"
        rows = rows if len(made) == 1 else torch.cat([made[each] for each in range(len(made))])
        rows, receives = rows.index_select(0, message.back), self._each_slice(self._pieces(at))
        how = RowCodec(rows.shape[1], rows.dtype, codec, seed)
        self._under_way[at] = self._exchange(at, rows, message.came, receives, self._numbers_of(at), how, name)

    def collect(self) -> Tensor:
        """The returned rows of all chunks, with the parts of sliced experts added: [n, width]."""
        slices, of_messages = self.wire.placement.slices, []
        self._seed_of_gradients = None
        for number in range(self._num):
            came, _ = self.wire.comm.wait(self._under_way.pop(number))
            if self._num == slices == 1:
                return came
            parts = came.split(self._each_slice(self._pieces(number)))
            teams = [parts[at : at + slices] for at in range(0, len(parts), slices)]
            of_messages.append([each[0] if slices == 1 else torch.stack(each).sum(0) for each in teams])
        return torch.cat([part for of_team in zip(*of_messages, strict=True) for part in of_team])

    def depart_again(self, grads: Tensor) -> None:
        """Start to send gradients of the returned rows to the ranks of the experts.

        The last message leaves first, because autograd goes back through the last chunk first.
        """
        wire, seed = self.wire, self.wire.draw()
        self._num = wire.num_back
        for number, message in reversed(list(enumerate(self._messages[self._num]))):
            sends, counts, numbers = self._to_teams(grads, number)
            how = RowCodec(sends.shape[1], sends.dtype, wire.gradients, seed)
            self._under_way[number] = self._exchange(
                number, sends, counts, message.came, numbers, how, "combine_gradients"
            )

    def _place(self, number: int) -> tuple[int, int, RowMessage]:
        """The message of a chunk in this pass, and the chunk's place in it."""
        at, place = divmod(number, self.num_chunks // self._num)
        return at, place, self._messages[self._num][at]

    def _numbers_of(self, number: int) -> Tensor:
        """Numbers of the rows that came in a message of this pass."""
        if self._num == self.wire.num_chunks:
            return self._told[number]
        forward = self._messages[self.wire.num_chunks]
        by_message = [self._told[at].split(message.came) for at, message in enumerate(forward)]
        of_ranks = [torch.cat(parts) for parts in zip(*by_message, strict=True)]
        return torch.cat(
            [each[number * len(each) // self._num : (number + 1) * len(each) // self._num] for each in of_ranks]
        )

    def _note(self, ends: Tensor, device: torch.device) -> None:
        """Note the messages and chunks that will arrive. ends: where the rows for each expert end, [ranks, experts]."""
        sizes, edges = ends[:, -1:], []
        for number in range(self.num_chunks):
            begin, end = (each * sizes // self.num_chunks for each in (number, number + 1))
            by_source = torch.minimum(torch.maximum(ends, begin), end).diff(dim=1, prepend=begin)
            self.chunk_counts.append(by_source.sum(0))
            edges.append((begin, by_source))
        for num in {self.wire.num_chunks, self.wire.num_back}:
            each = self.num_chunks // num
            parts = [edges[at : at + each] for at in range(0, self.num_chunks, each)]
            self._messages[num] = [message_of(part, device) for part in parts]

    def _pieces(self, number: int) -> list[slice]:
        """The slice of rows that each team gets in a message of this pass."""
        num = self._num
        return [
            slice(start + number * size // num, start + (number + 1) * size // num)
            for start, size in zip(self.starts, self.blocks, strict=False)
        ]

    def _each_slice(self, pieces: Sequence[slice]) -> list[int]:
        """Number of rows for each rank."""
        return [piece.stop - piece.start for piece in pieces for _ in range(self.wire.placement.slices)]

    def _to_teams(self, rows: Tensor, number: int) -> tuple[Tensor, list[int], Tensor]:
        """The rows of a message for each rank in turn, their counts, and their numbers."""
        slices, pieces, numbers = self.wire.placement.slices, self._pieces(number), self._numbers
        if slices > 1 or self._num > 1:
            rows, numbers = (torch.cat([x[piece] for piece in pieces for _ in range(slices)]) for x in (rows, numbers))
        return rows.contiguous(), self._each_slice(pieces), numbers

    def _exchange(
        self, number: int, rows: Tensor, counts: Sequence[int], receives: Sequence[int], numbers: Tensor,
        how: RowCodec, operation: str,
    ) -> Future[tuple[Tensor, Tensor]]:  # fmt: skip
        if not self.wire.hops:
            return self.wire.submit(
                lambda link: all_to_all_numbered(
                    link, rows, counts, receives, how, numbers, rounds_own=True, operation=operation
                )
            )
        hops, nothing = self.wire.hops[number], torch.zeros(len(counts), 0).long()

        def job(link: Link) -> Rounds[tuple[Tensor, Tensor]]:
            found = yield from all_to_all_two_hops(link, rows, counts, nothing, hops, how, numbers, operation=operation)
            return found[0], found[1]

        return self.wire.submit(job)


def message_of(chunks: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> RowMessage:
    """The message of some chunks, each by where it begins in the rows of each rank, and its rows by rank and expert."""
    begin, num_each = chunks[0][0], sum(by_source for _, by_source in chunks).sum(1)  # type: ignore[union-attr]
    experts, starts, orders = torch.arange(chunks[0][1].shape[1]), num_each.cumsum(0) - num_each, []
    for first, by_source in chunks:
        sizes = by_source.sum(1)
        at = starts + (first - begin).flatten() - (sizes.cumsum(0) - sizes)
        places = torch.arange(int(sizes.sum())) + at.repeat_interleave(sizes)
        of_rows = experts.repeat(len(sizes)).repeat_interleave(by_source.flatten())
        orders.append(places[of_rows.argsort(stable=True)])
    back = torch.cat(orders).argsort()
    return RowMessage(num_each.tolist(), [order.to(device) for order in orders], back.to(device))


class Depart(torch.autograd.Function):
    """Starts to send rows to their experts. Returns a token for each chunk, through which autograd keeps the order."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, rows: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        trip.depart(rows.detach())
        return tuple(rows.new_empty(0) for _ in range(trip.num_chunks))

    @staticmethod
    def backward(ctx: Any, *tokens: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.trip.collect()


class Arrive(torch.autograd.Function):
    """Waits for the rows of a chunk. The backward starts to send their gradients, and waits for nothing."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, number: int, token: Tensor) -> Tensor:
        ctx.trip, ctx.number, ctx.token = trip, number, token.detach()
        return trip.arrive(number)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        trip = ctx.trip
        trip.go_back(ctx.number, grads[0], is_backward=True)
        return None, None, ctx.token


class Return(torch.autograd.Function):
    """Starts to send the experts' outputs for a chunk back to the ranks its rows came from."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, number: int, rows: Tensor) -> Tensor:
        ctx.trip, ctx.number = trip, number
        trip.go_back(number, rows.detach(), is_backward=False)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *tokens: Tensor) -> tuple[Tensor | None, ...]:
        trip = ctx.trip
        found = trip.arrive(ctx.number)
        # Autograd comes to the first chunk last.
        if ctx.number == 0 and trip.wire.between is not None:
            trip.wire.between()
        return None, None, found


class Collect(torch.autograd.Function):
    """Waits for the experts' outputs for all chunks."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, *tokens: Tensor) -> Tensor:
        ctx.trip, ctx.tokens = trip, [token.detach() for token in tokens]
        return trip.collect()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.depart_again(grads[0])
        return None, *ctx.tokens
