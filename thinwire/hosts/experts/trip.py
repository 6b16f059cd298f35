"""The rows of one layer on their way to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, derive_seed
from thinwire.collectives import Communicator
from thinwire.collectives.all_to_all import Room, RowCodec, all_to_all_counted, all_to_all_rows
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.two_hops import Rooms, all_to_all_two_hops
from thinwire.methods.experts import Placement

T = TypeVar("T")
# Rows are numbered over all ranks: the numbers of each rank begin at a multiple of this.
NUMBERS_OF_A_RANK = 1 << 24


@dataclass
class Wire:
    """The ranks that hold the experts of a layer between them, and the codecs of what they exchange; jobs are urgent.

    members: ranks of `comm` among which rows travel, to the experts that `placement` has on them; the first is number
    `first` among all ranks that train the model, each other one `step` further. seed: of what codecs draw: forward the
    same in each pass, so that a recomputed one is the same; another for each message of gradients, counted in
    `num_drawn`. What is drawn depends on it and on the rows' numbers, so it is the same on any number of ranks. hops:
    of rows that go inside a node first; None: straight.
    """

    comm: Communicator
    placement: Placement
    members: Sequence[int]
    dispatch: Codec | None = None
    combine: Codec | None = None
    gradients: Codec | None = None
    first: int = 0
    step: int = 1
    seed: int = 0
    num_drawn: int = 0
    hops: Rooms | None = None
    room: Room = field(default_factory=Room)

    def forward_seed(self, way: int) -> int:
        """Of the way there, 0, or back, 1."""
        return derive_seed(self.seed, 0, way)

    def draw(self) -> int:
        """A seed for the gradients of one exchange, the same on all ranks."""
        self.num_drawn += 1
        return derive_seed(self.seed, self.num_drawn)

    def number(self, rank: int) -> int:
        """Of the first row of a rank of this group."""
        return (self.first + rank * self.step) * NUMBERS_OF_A_RANK

    def run(self, job: Callable[[Link], Rounds[T]]) -> T:
        """The result of a job among the members."""
        return self.comm.wait(self.comm.submit(lambda link: job(link.subgroup(self.members)), urgent=True))


class Trip:
    """The rows of one layer in one forward, which are sorted by expert, and their gradients.

    counts: this rank's rows of each expert. local_counts: once the rows are there, the rows of each expert of this rank
    from all ranks, int64 [experts of a rank].
    """

    def __init__(self, wire: Wire, counts: Tensor) -> None:
        self.wire, placement = wire, wire.placement
        self.counts = counts.cpu().view(placement.teams, placement.each)
        self.blocks: list[int] = self.counts.sum(1).tolist()
        self.starts = [0, *accumulate(self.blocks)]
        self.local_counts = torch.zeros(placement.each, dtype=torch.int64)
        self._came: list[int] = []
        self._order = self._back = torch.zeros(0, dtype=torch.int64)
        self._first: list[int] = []

    def depart(self, rows: Tensor) -> Tensor:
        """Rows [n, width] of all experts to their ranks: result [m, width], rows of this rank's experts, by expert."""
        wire, placement = self.wire, self.wire.placement
        notes = torch.cat([torch.tensor(self.starts[:-1])[:, None], self.counts], 1)
        notes = notes.repeat_interleave(placement.slices, 0)
        sends, counts, numbers = self._to_teams(rows)

        def job(link: Link) -> Rounds[tuple[Tensor, list[int], Tensor]]:
            seed, name = wire.forward_seed(0), "dispatch"
            if wire.hops is not None:
                how = RowCodec(sends.shape[1], sends.dtype, wire.dispatch, seed)
                return all_to_all_two_hops(link, sends, counts, notes, wire.hops, how, numbers, operation=name)
            return all_to_all_counted(
                link, sends, counts, notes, wire.room, wire.dispatch, seed=seed, first_rows=numbers, rounds_own=True,
                operation=name,
            )  # fmt: skip

        found, self._came, told = wire.run(job)
        by_source = told[:, 1:]
        self.local_counts = by_source.sum(0)
        self._first = [wire.number(rank) + int(start) for rank, start in enumerate(told[:, 0].tolist())]
        experts = torch.arange(placement.each).repeat(placement.ranks).repeat_interleave(by_source.flatten())
        order = experts.argsort(stable=True)
        self._order, self._back = order.to(rows.device), order.argsort().to(rows.device)
        return found.index_select(0, self._order)

    def go_back(self, rows: Tensor, *, is_backward: bool) -> Tensor:
        """Rows of this rank's experts to where they came from, where what slices give is added: [n, width]."""
        wire, slices = self.wire, self.wire.placement.slices
        sends = rows.index_select(0, self._back)
        receives = [block for block in self.blocks for _ in range(slices)]
        codec, seed, name = (
            (wire.gradients, wire.draw(), "dispatch_gradients")
            if is_backward
            else (wire.combine, wire.forward_seed(1), "combine")
        )
        found = self._exchange(sends, self._came, receives, self._first, codec, seed, name)
        if slices == 1:
            return found
        parts = found.split(receives)
        teams = [parts[at : at + slices] for at in range(0, len(parts), slices)]
        return torch.cat([torch.stack(each).sum(0) for each in teams])

    def depart_again(self, grads: Tensor) -> Tensor:
        """Gradients of what came back, to the ranks of the experts, as `depart`."""
        sends, counts, numbers = self._to_teams(grads)
        seed = self.wire.draw()
        found = self._exchange(sends, counts, self._came, numbers, self.wire.gradients, seed, "combine_gradients")
        return found.index_select(0, self._order)

    def _to_teams(self, rows: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """The rows for each rank, one after the other; how many; and the number of the first."""
        slices = self.wire.placement.slices
        counts = [block for block in self.blocks for _ in range(slices)]
        own = self.wire.number(self.wire.members.index(self.wire.comm.rank))
        numbers = [own + start for start in self.starts[:-1] for _ in range(slices)]
        if slices > 1:
            rows = torch.cat([block for block in rows.split(self.blocks) for _ in range(slices)])
        return rows.contiguous(), counts, numbers

    def _exchange(
        self, rows: Tensor, counts: Sequence[int], receives: Sequence[int], numbers: Sequence[int],
        codec: Codec | None, seed: int, operation: str,
    ) -> Tensor:  # fmt: skip
        wire = self.wire
        if wire.hops is not None:
            how, nothing = RowCodec(rows.shape[1], rows.dtype, codec, seed), torch.zeros(len(counts), 0).long()
            hops = wire.hops
            return wire.run(
                lambda link: all_to_all_two_hops(link, rows, counts, nothing, hops, how, numbers, operation=operation)
            )[0]
        return wire.run(
            lambda link: all_to_all_rows(
                link, rows, counts, receives, codec, seed=seed, first_rows=numbers, rounds_own=True, operation=operation
            )
        )


class Dispatch(torch.autograd.Function):
    """Rows to their experts."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, rows: Tensor) -> Tensor:
        ctx.trip = trip
        return trip.depart(rows.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.trip.go_back(grads[0], is_backward=True)


class Combine(torch.autograd.Function):
    """What experts return, to where the rows came from."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, rows: Tensor) -> Tensor:
        ctx.trip = trip
        return trip.go_back(rows.detach(), is_backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.trip.depart_again(grads[0])
