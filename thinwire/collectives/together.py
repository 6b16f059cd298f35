"""Parts of one job that run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.collectives.rounds import Awaited, Computed, Rounds


def together(*jobs: Rounds[Any]) -> Rounds[list[Any]]:
    """Run parts of one job side by side, each on its own `Link.part`. Return their results.

    While the messages of one part travel, the next part packs. Parts that compute on a pool do so at the same time.
    Each continues when its own work is done, in the order in which the parts requested it.
    """
    results: list[Any] = [None] * len(jobs)
    waiting: dict[int, Sequence[Awaited]] = {}

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
