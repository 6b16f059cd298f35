"""A plan is data: which rank holds which layers, the path of each micro-batch, the order of each rank's work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE = "F", "B", "I", "W", "R"
KINDS = {
    FORWARD: "forward",
    BACKWARD: "backward, whole",
    INPUT: "backward, the gradient of the input alone",
    WEIGHT: "backward, the gradients of the weights alone",
    RECOMPUTE: "forward again, for a backward whose activations were not kept",
}


class Visit(NamedTuple):
    """One micro-batch at one chunk."""

    chunk: int
    micro_batch: int


class Event(NamedTuple):
    """Something that happens to one micro-batch at one chunk."""

    kind: str
    chunk: int
    micro_batch: int

    @property
    def visit(self) -> Visit:
        """Where it happens."""
        return Visit(self.chunk, self.micro_batch)


class Action(Event):
    """One piece of a rank's work: kind is one of KINDS."""

    __slots__ = ()

    def __str__(self) -> str:
        """As torch writes it: chunk, kind, micro-batch."""
        return f"{self.chunk}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Plan:
    """One step of a pipeline, known before it runs.

    home: the rank of each chunk of layers. paths: for each micro-batch the chunks that it visits, in order; the loss
    follows the last. orders: for each rank what it does, in order. `check` says whether a plan can run.
    """

    home: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_micro_batches(self) -> int:
        return len(self.paths)

    def chunks_of(self, rank: int) -> list[int]:
        """The chunks that live on a rank."""
        return [chunk for chunk, home in enumerate(self.home) if home == rank]

    @cached_property
    def routes(self) -> Routes:
        """What comes before and after each visit."""
        return Routes(self.paths)


class Arrival(Event):
    """What a visit waits for from its neighbours: the hidden state forward, the gradient of its output backward.

    kind: "forward" or "backward".
    """

    __slots__ = ()

    def __str__(self) -> str:
        what = "the input" if self.kind == "forward" else "the gradient of the output"
        return f"{what} of micro-batch {self.micro_batch} at chunk {self.chunk}"


class Routes:
    """The neighbours of each visit on its micro-batch's path, and at which hop of the path it is."""

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        self.before: dict[Visit, Visit | None] = {}
        self.after: dict[Visit, Visit | None] = {}
        self.hop: dict[Visit, int] = {}
        for micro_batch, path in enumerate(paths):
            visits = [Visit(chunk, micro_batch) for chunk in path]
            self.before.update(zip(visits, [None, *visits], strict=False))
            self.after.update(zip(visits, [*visits[1:], None], strict=True))
            self.hop.update((visit, hop) for hop, visit in enumerate(visits))

    def needs(self, action: Action) -> list[Action | Arrival]:
        """What must be there before an action can start."""
        visit, own = action.visit, Action(FORWARD, *action.visit)
        if action.kind == FORWARD:
            return [Arrival("forward", *visit)] if self.before[visit] else []
        if action.kind == RECOMPUTE:
            return [own]
        if action.kind == WEIGHT:
            return [Action(INPUT, *visit)]
        return [own, Arrival("backward", *visit)] if self.after[visit] else [own]

    def gives(self, action: Action) -> Arrival | None:
        """What a neighbour has of an action."""
        if action.kind == FORWARD:
            after = self.after[action.visit]
            return Arrival("forward", *after) if after else None
        if action.kind in (BACKWARD, INPUT):
            before = self.before[action.visit]
            return Arrival("backward", *before) if before else None
        return None


def straight(num_chunks: int, num_micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """The paths of micro-batches that all visit all chunks in order."""
    return (tuple(range(num_chunks)),) * num_micro_batches


def ordered(actions: Iterable[tuple[str, int, int]]) -> tuple[Action, ...]:
    """A rank's order."""
    return tuple(Action(*action) for action in actions)
