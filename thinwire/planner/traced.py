"""The simulated step of a plan as spans of time, and the bytes that it sends over each link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from thinwire.cost import Message
from thinwire.cost.simulate import TRAINING
from thinwire.cost.trace import SENDING, Span
from thinwire.methods.pipeline.plan import BACKWARD, FORWARD, INPUT, RECOMPUTE, SCORE, TRAIN, WEIGHT
from thinwire.planner.placed import Pricing, Staged
from thinwire.planner.search import Priced

NAMES = {
    FORWARD: "forward", BACKWARD: "backward", INPUT: "backward of inputs", WEIGHT: "backward of weights",
    RECOMPUTE: "forward again", SCORE: "scores", TRAIN: "head",
}  # fmt: skip


def spans_of(pricing: Pricing, priced: Priced) -> list[Span]:
    """What each rank does in the simulated step of a candidate.

    With stages: all pipelines as the one whose messages take longest, then the messages between the replicas of each
    stage.
    """
    way = priced.candidate
    if way.stages == 1:
        return list(pricing.simulated(way).pieces())
    return list(_of_stages(pricing.staged(way, priced.order), way.stages))


def link_bytes(pricing: Pricing, priced: Priced) -> dict[tuple[int, int], float]:
    """Bytes of one step, by (from rank, to rank)."""
    way, found = priced.candidate, Counter[tuple[int, int]]()
    if way.stages == 1:
        graphs = [(pricing.simulated(way), list(range(pricing.machine.num_ranks)))]
    else:
        staged = pricing.staged(way, priced.order)
        graphs = list(zip(staged.exchanges, staged.grid.groups(way.stages), strict=True))
        for ranks in staged.grid.pipelines(way.stages):
            for (source, target), num_bytes in staged.stages.link_bytes.items():
                found[ranks[source], ranks[target]] += num_bytes  # type: ignore[assignment]
    for timeline, ranks in graphs:
        for task in timeline.graph.tasks:
            if isinstance(task.does, Message):
                found[ranks[task.rank], ranks[task.does.target]] += task.does.num_bytes  # type: ignore[assignment]
    return dict(found)


def _of_stages(staged: Staged, num_stages: int) -> Iterator[Span]:
    stages, grid, timeline = staged.stages, staged.grid, staged.stages.timeline
    for ranks in grid.pipelines(num_stages):
        for place, own in enumerate(timeline.spans):
            for action, begin, end in own:
                yield Span(ranks[place], TRAINING, f"{NAMES.get(action.kind, action.kind)} {action}", begin, end)
            if stages.more_s:
                yield Span(ranks[place], TRAINING, "more micro-batches", timeline.makespan_s, stages.step_s)
        for source, target, what, begin, end in timeline.messages:
            words = f"{what.kind} of micro-batch {what.micro_batch}"
            yield Span(ranks[source], SENDING, words, begin, end, ranks[target])
    for group, exchange in zip(grid.groups(num_stages), staged.exchanges, strict=True):
        yield from exchange.pieces(group, stages.step_s)
