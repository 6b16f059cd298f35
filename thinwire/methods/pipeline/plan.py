"""A plan as data: which rank holds which layers, the path of each micro-batch, the order of each rank's work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE = "F", "B", "I", "W", "R"
SCORE, AGREE, TRAIN, EMBED, SCATTER = "S", "C", "T", "E", "D"
KINDS = {
    FORWARD: "forward",
    BACKWARD: "backward, whole",
    INPUT: "backward, the gradient of the input alone",
    WEIGHT: "backward, the gradients of the weights alone",
    RECOMPUTE: "forward again, for a backward whose activations were not kept",
}
# What every rank does for every micro-batch where embedding and head are spread over all ranks: each has some of their
# rows. Of such an action the chunk is the number of these rows, which is the rank's.
SPREAD_KINDS = {
    EMBED: "rows of the tokens that are here, for the first layer",
    SCORE: "logits of the rows that are here",
    AGREE: "the softmax over all ranks, the barrier; with one barrier also this rank's part of the layers' gradient",
    TRAIN: "the gradient of the head's rows; with two barriers also this rank's part of the layers' gradient",
    SCATTER: "the gradient of the embedding's rows",
}
# Forward alone.
FORWARD_KINDS = (FORWARD, EMBED, SCORE, AGREE)


class Visit(NamedTuple):
    """One micro-batch at one chunk."""

    chunk: int
    micro_batch: int


class Event(NamedTuple):
    """An event of one micro-batch at one chunk."""

    kind: str
    chunk: int
    micro_batch: int

    @property
    def visit(self) -> Visit:
        """The micro-batch and the chunk."""
        return Visit(self.chunk, self.micro_batch)


class Action(Event):
    """One piece of a rank's work: kind is one of KINDS, or of SPREAD_KINDS."""

    __slots__ = ()

    def __str__(self) -> str:
        """The action as torch writes it: chunk, kind, micro-batch."""
        return f"{self.chunk}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Plan:
    """One step of a pipeline, known before it runs. `check` says whether it can run.

    Attributes:
        home: the rank of each chunk of layers.
        paths: for each micro-batch the chunks that it visits, in order; the loss follows the last.
        orders: for each rank its actions, in order.
        barriers: if embedding and head are spread over all ranks, the number of barriers between the last forward of a
            micro-batch and its first backward: 1 or 2; 0: embedding and head are in the first and the last chunk.
        bridges: (source, target): what a chunk gives a later one besides the hidden state, straight to its rank.
    """

    home: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[Action, ...], ...]
    barriers: int = 0
    bridges: tuple[tuple[int, int], ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_micro_batches(self) -> int:
        return len(self.paths)

    def chunks_of(self, rank: int) -> list[int]:
        """The chunks on a rank."""
        return [chunk for chunk, home in enumerate(self.home) if home == rank]

    @cached_property
    def routes(self) -> Routes:
        """The neighbours of each visit."""
        return Routes(self.paths, self.home, self.barriers, self.bridges)


class Arrival(Event):
    """A tensor that a visit waits for: the hidden state forward, the gradient of its output backward.

    kind: "forward" or "backward".
    """

    __slots__ = ()

    def __str__(self) -> str:
        what = "the input" if self.kind == "forward" else "the gradient of the output"
        return f"{what} of micro-batch {self.micro_batch} at chunk {self.chunk}"


class Bridged(NamedTuple):
    """What one chunk gives a later one besides the hidden state, or its gradient on the way back.

    kind: "forward" or "backward". source, target: chunks, in the order of the forward.
    """

    kind: str
    source: int
    target: int
    micro_batch: int

    @property
    def ends(self) -> tuple[int, int]:
        """The chunks that send and receive this message."""
        return (self.source, self.target) if self.kind == "forward" else (self.target, self.source)

    def __str__(self) -> str:
        what = "what" if self.kind == "forward" else "the gradient of what"
        return f"{what} chunk {self.source} gives chunk {self.target} of micro-batch {self.micro_batch}"


class Shared(NamedTuple):
    """A message from one rank to another, if embedding and head are spread over all ranks.

    kind: "rows": the embeddings of the source's tokens; "hidden": the input of the head; "scores": for each token, the
    largest logit, the sum of exponentials and the target's logit; "part": the source's part of the gradient of
    "hidden"; "gradient": the gradient of "rows".
    """

    kind: str
    source: int
    target: int
    micro_batch: int

    def __str__(self) -> str:
        return f"the {self.kind} of micro-batch {self.micro_batch} from rank {self.source}"


PlanMessage = Arrival | Shared | Bridged


def direction_of(given: PlanMessage) -> str:
    """Whether a message counts as "forward" or "backward", which also selects its codec."""
    if isinstance(given, Shared):
        return "backward" if given.kind in ("part", "gradient") else "forward"
    return given.kind


def target_of(given: PlanMessage, home: Sequence[int]) -> int:
    """The rank that receives a message. home: see Plan."""
    if isinstance(given, Bridged):
        return home[given.ends[1]]
    return given.target if isinstance(given, Shared) else home[given.chunk]


class Beside(NamedTuple):
    """A message of a step that belongs to no micro-batch.

    kind: "weight": a tied weight, to the rank that borrows it; "gradient": its gradient, back to the owner; "copy": of
    what a rank has outside of layers, for a recovery.
    """

    kind: str
    source: int
    target: int

    def __str__(self) -> str:
        return f"{'copy of ends' if self.kind == 'copy' else f'tied {self.kind}'}, rank {self.source} to {self.target}"


class Routes:
    """The neighbours of each visit on its micro-batch's path, and the number of its hop.

    home, barriers, bridges: see Plan; home is only needed if barriers are not 0.
    """

    def __init__(
        self, paths: Sequence[Sequence[int]], home: Sequence[int] = (), barriers: int = 0,
        bridges: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self.bridges = bridges
        self.before: dict[Visit, Visit | None] = {}
        self.after: dict[Visit, Visit | None] = {}
        self.hop: dict[Visit, int] = {}
        self.barriers = barriers
        self._ranks = range(max(home) + 1) if barriers else range(0)
        self._ends = [(home[path[0]], home[path[-1]]) if barriers and path else (0, 0) for path in paths]
        for micro_batch, path in enumerate(paths):
            visits = [Visit(chunk, micro_batch) for chunk in path]
            self.before.update(zip(visits, [None, *visits], strict=False))
            self.after.update(zip(visits, [*visits[1:], None], strict=True))
            self.hop.update((visit, hop) for hop, visit in enumerate(visits))

    def needs(self, action: Action) -> list[Action | PlanMessage]:
        """What must have arrived or ended before an action can start; what comes over bridges is last."""
        return [*self._needs(action), *self._bridged(action, is_given=False)]

    def gives(self, action: Action) -> list[PlanMessage]:
        """The tensors of an action that other ranks, or the same rank later, need; those over bridges are last."""
        return [*self._gives(action), *self._bridged(action, is_given=True)]

    def _bridged(self, action: Action, *, is_given: bool) -> list[PlanMessage]:
        """What an action gives over bridges, or needs. Backward, a bridge leads from its second chunk to its first."""
        if action.kind not in (FORWARD, BACKWARD):
            return []
        is_forward = action.kind == FORWARD
        way, end = "forward" if is_forward else "backward", int(is_given != is_forward)
        return [Bridged(way, *ends, action.micro_batch) for ends in self.bridges if ends[end] == action.chunk]

    def _needs(self, action: Action) -> list[Action | PlanMessage]:
        visit, own, number = action.visit, Action(FORWARD, *action.visit), action.micro_batch
        if action.kind == FORWARD:
            return [Arrival("forward", *visit)] if self.before[visit] else self._from_all("rows", number, 0)
        if action.kind == RECOMPUTE:
            return [own]
        if action.kind == WEIGHT:
            return [Action(INPUT, *visit)]
        if action.kind in (BACKWARD, INPUT):
            return [own, *([Arrival("backward", *visit)] if self.after[visit] else self._from_all("part", number, -1))]
        first, last = self._ends[number]
        if action.kind == SCORE:
            return [Shared("hidden", last, action.chunk, number)]
        if action.kind == AGREE:
            scores = (Shared("scores", rank, action.chunk, number) for rank in self._ranks)
            return [Action(SCORE, *visit), *scores]
        if action.kind == TRAIN:
            return [Action(AGREE, *visit)]
        return [Shared("gradient", first, action.chunk, number)] if action.kind == SCATTER else []

    def _gives(self, action: Action) -> list[PlanMessage]:
        rank, number = action.chunk, action.micro_batch
        if action.kind == FORWARD:
            after = self.after[action.visit]
            return [Arrival("forward", *after)] if after else self._to_all("hidden", number, -1)
        if action.kind in (BACKWARD, INPUT):
            before = self.before[action.visit]
            return [Arrival("backward", *before)] if before else self._to_all("gradient", number, 0)
        if action.kind == SCORE:
            return [Shared("scores", rank, other, number) for other in self._ranks]
        if action.kind == EMBED:
            return [Shared("rows", rank, self._ends[number][0], number)]
        # With one barrier the gradient needs no more than what ranks agree on.
        if action.kind == (AGREE if self.barriers == 1 else TRAIN):
            return [Shared("part", rank, self._ends[number][1], number)]
        return []

    def _from_all(self, kind: str, number: int, end: int) -> list[Action | PlanMessage]:
        """The messages from each rank to that of one end of a path."""
        return [Shared(kind, rank, self._ends[number][end], number) for rank in self._ranks]

    def _to_all(self, kind: str, number: int, end: int) -> list[PlanMessage]:
        return [Shared(kind, self._ends[number][end], rank, number) for rank in self._ranks]


def straight(num_chunks: int, num_micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """The paths of micro-batches that all visit all chunks in order."""
    return (tuple(range(num_chunks)),) * num_micro_batches


def ordered(actions: Iterable[tuple[str, int, int]]) -> tuple[Action, ...]:
    """A rank's order."""
    return tuple(Action(*action) for action in actions)


def repeated(
    starts: Sequence[Mapping[tuple[str, int], float]], interval: float, num_micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    """The order of each rank that does (kind, chunk) of micro-batch m at its start, plus m times the interval."""
    numbers = range(num_micro_batches)
    return tuple(
        ordered(
            (*each, number)
            for _, each, number in sorted(
                (start + interval * number, each, number) for each, start in of_rank.items() for number in numbers
            )
        )
        for of_rank in starts
    )
