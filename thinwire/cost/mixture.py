"""A layer of experts whose rows travel in chunks: the graph of a pass, and FSMoE's closed form of its seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.cost.graph import SECONDS, Drawing, Message, StepGraph, Work
from thinwire.cost.links import Links
from thinwire.cost.simulator import simulate

# Bytes from rank to rank that leave together.
HopLoad = Mapping[tuple[int, int], float]
# Of more ranks the messages are bundled: the time that a simulation takes grows faster than the square of the messages.
MOST_RANKS = 8


@dataclass(frozen=True)
class Portion:
    """Rows that travel together. there, back: hops to the experts and home. work_s: seconds of each rank's experts."""

    there: Sequence[HopLoad]
    work_s: Sequence[float]
    back: Sequence[HopLoad]


def pass_graph(num_ranks: int, chunks: Sequence[Portion], *, is_told: bool) -> StepGraph:
    """One pass through a layer on all ranks, whose chunks follow each other.

    is_told: the first chunk carries the numbers of rows, and the other chunks leave once it has arrived.
    """
    drawing = Drawing(num_ranks)
    ready: list[tuple[int, ...]] = [()] * num_ranks
    there = []
    for number, chunk in enumerate(chunks):
        there.append(_travel(drawing, chunk.there, ready))
        ready = there[0] if is_told and not number else ready
    for chunk, came in zip(chunks, there, strict=True):
        done = [
            drawing.task(rank, Work(SECONDS, seconds), came[rank]) if seconds else came[rank]
            for rank, seconds in enumerate(chunk.work_s)
        ]
        _travel(drawing, chunk.back, done)
    return drawing.done()


def _travel(drawing: Drawing, hops: Sequence[HopLoad], ready: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Draw the hops; each leaves a rank once the hop before has arrived there. Return what each rank waits for then."""
    found = list(ready)
    for hop in hops:
        left, found = found, list(found)
        for (source, target), num_bytes in hop.items():
            if source != target:
                found[target] += drawing.task(source, Message(target, num_bytes, "rows", ""), left[source])
    return found


def passes_s(
    nodes: Sequence[int], forward: Sequence[Portion], backward: Sequence[Portion], links: Links,
    most_ranks: int = MOST_RANKS,
) -> float:  # fmt: skip
    """Seconds of the simulated forward and backward of a layer on the ranks of these nodes, all of equal size.

    The messages of more than most_ranks ranks are bundled, see `bundled`.
    """
    if len(nodes) > most_ranks:
        forward, backward = (
            [Portion(bundled(each.there, nodes), each.work_s, bundled(each.back, nodes)) for each in chunks]
            for chunks in (forward, backward)
        )
    machine = links.machine(nodes)
    graphs = pass_graph(len(nodes), forward, is_told=True), pass_graph(len(nodes), backward, is_told=False)
    return sum(simulate(graph, machine).makespan_s for graph in graphs)


def bundled(hops: Sequence[HopLoad], nodes: Sequence[int]) -> list[HopLoad]:
    """Hops in which a rank sends one message inside its node and one to another node.

    They carry what the rank sends on the level, or what the receiver gets where that is more, and take as long as the
    messages of `Links.machine` do if all ranks send as much. Nodes are numbered 0, 1, and so on, with their ranks in
    order.
    """
    num, local_size = len(nodes), nodes.count(nodes[0])
    found: list[HopLoad] = []
    for hop in hops:
        sent: Counter[tuple[int, bool]] = Counter()
        received: Counter[tuple[int, bool]] = Counter()
        for (source, target), num_bytes in hop.items():
            if source != target:
                crosses = nodes[source] != nodes[target]
                sent[source, crosses] += num_bytes  # type: ignore[assignment]
                received[target, crosses] += num_bytes  # type: ignore[assignment]
        bundles: dict[tuple[int, int], float] = {}
        for rank in range(num):
            inside = nodes[rank] * local_size + (rank + 1) % local_size
            # Inside a node, each pair has a link of its own.
            for target, crosses, parts in ((inside, False, local_size - 1), ((rank + local_size) % num, True, 1)):
                if num_bytes := max(sent[rank, crosses], received[target, crosses]):
                    bundles[rank, target] = num_bytes / parts
        found.append(bundles)
    return found


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
