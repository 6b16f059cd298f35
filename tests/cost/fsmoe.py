"""FSMoE's closed forms, to which tests hold the simulation and what a run does; neither chooses by them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from thinwire.cost.links import Line


def fsmoe_s(
    all_to_all_s: float, gather_s: float, scatter_s: float, expert_s: float, chunks: int, gradients_s: float = 0.0
) -> tuple[float, int]:
    """Seconds of one pass through a layer by FSMoE's formula, and its case, 1 to 4.

    Each chunk's rows cross between nodes (all_to_all_s), are gathered inside one, worked on, scattered and sent back.
    The case names the bottleneck: 1: the link between nodes, 2: the experts, 4: the links inside, 3: all in turns.
    The formula assumes three separate streams, and gradients that leave after the last dispatch.

    Args:
        all_to_all_s, gather_s, scatter_s, expert_s: seconds of one chunk.
        gradients_s: seconds in which gradients are averaged between nodes meanwhile; 0 in a forward.

    Source: Pan et al., "FSMoE" (ASPLOS 2025), conditions Q1 to Q7 and cases 1 to 4.
    """
    inside, idle = gather_s + scatter_s, 2 * (chunks - 1) * all_to_all_s
    if all_to_all_s > gather_s:
        is_waiting = chunks * expert_s > idle
        is_bound = gradients_s > (chunks * expert_s - idle + inside if is_waiting else inside)
    else:
        is_waiting = chunks * expert_s > (chunks - 1) * inside
        is_bound = gradients_s > (inside + chunks * expert_s if is_waiting else chunks * inside) - idle
    if is_bound:
        return 2 * chunks * all_to_all_s + gradients_s, 1
    if is_waiting:
        return 2 * all_to_all_s + inside + chunks * expert_s, 2
    if all_to_all_s > gather_s:
        return 2 * chunks * all_to_all_s + inside, 3
    return 2 * all_to_all_s + chunks * inside, 4


def excess_s(sent: Sequence[float], idle_s: Sequence[float], line: Line) -> float:
    """Seconds that gradients add to a backward: beyond the idle time of each layer, and all those after the last one.

    sent: bytes in each layer, and after the last; one more than idle_s.
    """
    inside = zip(sent, idle_s, strict=False)
    return sum(max(0.0, line.seconds(num) - idle) for num, idle in inside) + line.seconds(sent[-1])


def partition(produced: Sequence[float], idle_s: Sequence[float], line: Line) -> list[float]:
    """Bytes to send in each layer, and after the last one: as `excess_s` takes them, in the fewest seconds.

    Step 1 is as published: each layer takes what is there, as much as fits its idle time. A byte of the rest costs
    beta wherever it goes, and a message after the last layer alpha in addition. So step 2 has one choice: the rest goes
    there, or all of it into one layer after whose gradients everything fits. That is exact, and needs no search.

    A run does step 1 alone: the gradients of its embedding always come after the last layer, so its choice is made.

    Args:
        produced: bytes that come before each layer's idle time, in the order of the backward, and after the last.
        idle_s: seconds in which a layer's backward leaves the link alone.
        line: of the gradients' sum on the link.

    Source: Pan et al., "FSMoE" (ASPLOS 2025), section 5, with another step 2.
    """
    rooms = [line.room(idle) for idle in idle_s]
    sent, waiting, pending = [], list[float](), 0.0
    for num, room in zip(produced, rooms, strict=False):
        waiting.append(pending + num)
        sent.append(min(waiting[-1], room))
        pending = waiting[-1] - sent[-1]
    rest = pending + produced[-1]
    best = [*sent, rest]
    if not rest or produced[-1]:
        return best
    # Room that is left behind each layer, by gradients that come later themselves.
    behind = [room - num for room, num in zip(rooms, produced, strict=False)]
    spare = [*list(accumulate(reversed(behind)))[::-1][1:], 0.0]
    for layer, room in enumerate(spare):
        if min(spare[layer:]) < 0:
            continue
        own = max(0.0, waiting[layer] - room)
        if own < sent[layer]:
            continue
        found, pending = [*sent[:layer], own], waiting[layer] - own
        for num, most in zip(produced[layer + 1 : -1], rooms[layer + 1 :], strict=True):
            found.append(min(pending + num, most))
            pending += num - found[-1]
        best = min(best, [*found, 0.0], key=lambda each: excess_s(each, idle_s, line))
    return best
