"""A layer of experts whose rows travel in chunks: the graph of a pass, and its simulated seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from thinwire.cost.graph import SECONDS, Drawing, Message, StepGraph, Work
from thinwire.cost.links import INTER, INTRA, Links
from thinwire.cost.simulator import Timeline, simulate

# Bytes from rank to rank that leave together.
HopLoad = Mapping[tuple[int, int], float]
# Of more ranks the messages are bundled: the time that a simulation takes grows faster than the square of the messages.
MOST_RANKS = 8
ROWS = "rows"


@dataclass(frozen=True)
class Portion:
    """Rows that travel together.

    there, back: hops to the experts and home. work_s: seconds of each rank's experts. names: of the messages of the
    hops there, and of those back.
    """

    there: Sequence[HopLoad]
    work_s: Sequence[float]
    back: Sequence[HopLoad]
    names: tuple[Sequence[str], Sequence[str]] = ((), ())


def pass_graph(num_ranks: int, chunks: Sequence[Portion], *, is_told: bool) -> StepGraph:
    """One pass through a layer on all ranks, whose chunks follow each other.

    is_told: the first chunk carries the numbers of rows, and the other chunks leave once it has arrived.
    """
    drawing = Drawing(num_ranks)
    ready: list[tuple[int, ...]] = [()] * num_ranks
    there = []
    for number, chunk in enumerate(chunks):
        there.append(_travel(drawing, chunk.there, ready, chunk.names[0]))
        ready = there[0] if is_told and not number else ready
    for chunk, came in zip(chunks, there, strict=True):
        done = [
            drawing.task(rank, Work(SECONDS, seconds), came[rank]) if seconds else came[rank]
            for rank, seconds in enumerate(chunk.work_s)
        ]
        _travel(drawing, chunk.back, done, chunk.names[1])
    return drawing.done()


def _travel(
    drawing: Drawing, hops: Sequence[HopLoad], ready: Sequence[tuple[int, ...]], names: Sequence[str]
) -> list[tuple[int, ...]]:
    """Draw the hops; each leaves a rank once the hop before has arrived there. Return what each rank waits for then."""
    found = list(ready)
    for hop, name in zip(hops, names or [ROWS] * len(hops), strict=True):
        left, found = found, list(found)
        for (source, target), num_bytes in hop.items():
            if source != target:
                found[target] += drawing.task(source, Message(target, num_bytes, name, ""), left[source])
    return found


def passes_s(
    nodes: Sequence[int], forward: Sequence[Portion], backward: Sequence[Portion], links: Links,
    most_ranks: int = MOST_RANKS,
) -> float:  # fmt: skip
    """Seconds of the simulated forward and backward of a layer, see `timelines`."""
    return sum(each.makespan_s for each in timelines(nodes, forward, backward, links, most_ranks))


def timelines(
    nodes: Sequence[int], forward: Sequence[Portion], backward: Sequence[Portion], links: Links,
    most_ranks: int = MOST_RANKS,
) -> list[Timeline]:  # fmt: skip
    """The simulated forward and backward of a layer on the ranks of these nodes, all of equal size.

    The messages of more than most_ranks ranks are bundled, see `bundled`.
    """
    if len(nodes) > most_ranks:
        forward, backward = (
            [replace(each, there=bundled(each.there, nodes), back=bundled(each.back, nodes)) for each in chunks]
            for chunks in (forward, backward)
        )
    machine = links.machine(nodes)
    graphs = pass_graph(len(nodes), forward, is_told=True), pass_graph(len(nodes), backward, is_told=False)
    return [simulate(graph, machine) for graph in graphs]


def streams_s(timeline: Timeline, nodes: Sequence[int]) -> dict[tuple[str, str], float]:
    """Seconds in which a message to or from the first rank is under way, by (name, level), as the meter counts them."""
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for task, span in zip(timeline.graph.tasks, timeline.spans, strict=True):
        if isinstance(task.does, Message) and 0 in (task.rank, task.does.target):
            level = INTRA if nodes[task.rank] == nodes[task.does.target] else INTER
            spans.setdefault((task.does.operation, level), []).append(span)
    found = {}
    for key, of_key in spans.items():
        found[key], last = 0.0, 0.0
        for begin, end in sorted(of_key):
            found[key] += max(0.0, end - max(begin, last))
            last = max(last, end)
    return found


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
