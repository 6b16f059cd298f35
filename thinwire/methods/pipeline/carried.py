"""What a micro-batch leaves at a stage for others: values of this round, with their gradients, or of the last."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.methods.pipeline.plan import BACKWARD, FORWARD, Plan, ordered, straight

CarriedKey = tuple[str, int]


class Carried:
    """Values that micro-batches of one stage need of each other, such as the neighbours of a part of a graph.

    A round takes each micro-batch once, in an order. One that comes later gets the value of this round; its gradient is
    added to that of the micro-batch that left it, whose backward must come after. One that comes earlier gets the value
    of the last round, as a constant. Where no micro-batch needs a later one, as in causal attention over parts of a
    sequence, every gradient is exact. `there_and_back` is a plan for it; halves of backwards do not serve it.
    Source: "GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism"; what of it is not published, such as
    the gradients of constants, is this file's own choice.
    """

    def __init__(self) -> None:
        self._now: dict[CarriedKey, Tensor] = {}
        self._last: dict[CarriedKey, Tensor] = {}
        self._turn: dict[int, int] = {}

    def begin(self, order: Sequence[int]) -> None:
        """Begin a round: micro-batches in the order in which their forwards come.

        Raises ConfigError for gradients of the round before that reached no micro-batch.
        """
        lost = sorted({number for (_, number), leaf in self._now.items() if leaf.grad is not None})
        if lost:
            raise ConfigError(
                f"gradients of what micro-batches {lost} left came too late, or these did not use it themselves: "
                "backwards must come in the opposite order of forwards; nearest: there_and_back"
            )
        self._last |= {place: leaf.detach() for place, leaf in self._now.items()}
        self._now.clear()
        self._turn = {number: turn for turn, number in enumerate(order)}

    def leave(self, name: str, number: int, value: Tensor) -> Tensor:
        """Leave a value of micro-batch `number` for others; what it returns must be used by the micro-batch itself."""
        # A forward that is computed again leaves the same, and others have taken the first.
        leaf = self._now.setdefault((name, number), value.detach().requires_grad_())
        given = value.view_as(value)
        if given.requires_grad:
            given.register_hook(partial(_with_others, leaf))
        elif torch.is_grad_enabled():
            # A constant, such as a graph's features.
            leaf.grad = None
            leaf.requires_grad_(False)
        return given

    def of(self, name: str, other: int, reader: int) -> Tensor | None:
        """What micro-batch `other` left, for micro-batch `reader`; None if it has left nothing yet."""
        if self._turn[other] < self._turn[reader]:
            return self._now[name, other]
        return self._last.get((name, other))


def _with_others(leaf: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of a value, with those that have been collected of its readers."""
    others, leaf.grad = leaf.grad, None
    return gradient if others is None else gradient + others


def there_and_back(num_ranks: int, order: Sequence[int]) -> Plan:
    """All forwards in an order, then all backwards in the opposite one, on stages one after the other.

    order: of the micro-batches, each once. As long as GPipe, with all micro-batches in flight.
    """
    orders = tuple(
        ordered([(FORWARD, rank, i) for i in order] + [(BACKWARD, rank, i) for i in reversed(order)])
        for rank in range(num_ranks)
    )
    return Plan(tuple(range(num_ranks)), straight(num_ranks, len(order)), orders)


@torch.no_grad()
def least_cut(edges: Tensor, num_parts: int) -> list[Tensor]:
    """Parts of a graph with as many vertices each, and little weight of edges between them; int64 [vertices of a part].

    Parts of neighbouring numbers at first; then of all pairs of vertices in two parts the one that gains most changes
    places, until none gains.

    edges: symmetric weights [vertices, vertices]. Sizes differ by one where the number of parts does not divide them.
    Source: Kernighan and Lin, "An efficient heuristic procedure for partitioning graphs" (1970), without its look
    ahead.
    """
    num = len(edges)
    weights = edges.double() * (1 - torch.eye(num, dtype=torch.float64))
    place = torch.cat([torch.full((len(own),), part) for part, own in enumerate(torch.arange(num).chunk(num_parts))])
    while True:
        to_parts = weights @ torch.nn.functional.one_hot(place, num_parts).double()
        to_part_of, own = to_parts[:, place], to_parts.gather(1, place[:, None])
        gain = to_part_of + to_part_of.T - own - own.T - 2 * weights
        gain[place[:, None] == place] = 0
        best = int(gain.argmax())
        if gain.flatten()[best] <= 1e-9:
            return [(place == part).nonzero().flatten() for part in range(num_parts)]
        one, other = divmod(best, num)
        place[one], place[other] = place[other].item(), place[one].item()
