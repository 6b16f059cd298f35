"""The simulated step of a plan as spans of time, and the bytes that it sends over each link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from thinwire.cost.simulator import TRAINING
from thinwire.cost.trace import SENDING, TraceSpan
from thinwire.methods.pipeline.plan import BACKWARD, FORWARD, INPUT, RECOMPUTE, SCORE, TRAIN, WEIGHT, Beside
from thinwire.planner.islands import islands_of, links_between
from thinwire.planner.mixture import shared_experts
from thinwire.planner.pricing import Pricing
from thinwire.planner.search import Priced
from thinwire.planner.stages import Stages

NAMES = {
    FORWARD: "forward", BACKWARD: "backward", INPUT: "backward of inputs", WEIGHT: "backward of weights",
    RECOMPUTE: "forward again", SCORE: "scores", TRAIN: "head",
}  # fmt: skip


def spans_of(pricing: Pricing, priced: Priced) -> Iterator[TraceSpan]:
    """Yield what each rank does in the simulated step of a candidate.

    With stages: all pipelines as the one whose messages take longest, then the messages between the replicas of each
    stage. The ranks of a tensor axis do all the same; messages inside layers stand in the time of these.
    """
    way = priced.candidate
    if way.outer:
        for island in islands_of(pricing, way):
            inside = replace(priced, candidate=way.inside, order=tuple(range(len(island))))
            for span in spans_of(pricing.on(island), inside):
                target = None if span.target is None else island[span.target]
                yield replace(span, rank=island[span.rank], target=target)
        return
    if way.experts > 1:
        yield from shared_experts(pricing, way).timeline.pieces()
        return
    if way.stages == 1:
        timeline, (group,) = pricing.simulated(way, priced.order), pricing.placed(priced.order, way.tensor).groups(1)
        for ranks in along_tensor(group, way.tensor):
            yield from timeline.pieces(ranks)
        return
    staged = pricing.staged(way, priced.order)
    for ranks in staged.grid.pipelines(way.stages):
        for own in along_tensor(ranks, way.tensor):
            yield from _of_pipeline(staged.stages, own)
    for group, exchange in zip(staged.grid.groups(way.stages), staged.exchanges, strict=True):
        for own in along_tensor(group, way.tensor):
            yield from exchange.pieces(own, staged.stages.step_s)


def link_bytes(pricing: Pricing, priced: Priced) -> dict[tuple[int, int], float]:
    """Bytes of one step, by (from rank, to rank), without those of torch on a tensor axis."""
    way, found = priced.candidate, Counter[tuple[int, int]]()
    for span in spans_of(pricing, priced):
        if span.target is not None:
            found[span.rank, span.target] += span.num_bytes  # type: ignore[assignment]
    if way.outer:
        for pair, num_bytes in links_between(pricing, way):
            found[pair] += num_bytes  # type: ignore[assignment]
        for island in islands_of(pricing, way):
            inside = replace(priced, candidate=way.inside, order=tuple(range(len(island))))
            for (a, b), num_bytes in beside_spans(pricing.on(island), inside).items():
                found[island[a], island[b]] += num_bytes  # type: ignore[assignment]
        return dict(found)
    for pair, num_bytes in beside_spans(pricing, priced).items():
        found[pair] += num_bytes  # type: ignore[assignment]
    return dict(found)


def link_messages(pricing: Pricing, priced: Priced, spans: Iterable[TraceSpan]) -> dict[tuple[int, int], int]:
    """Messages of one step, by (from rank, to rank), without those of torch on a tensor axis and of islands.

    spans: of `spans_of`. Attention sends two in each layer of a micro-batch, forward and backward, and experts four.
    """
    way, found = priced.candidate, Counter((span.rank, span.target) for span in spans if span.target is not None)
    passes = way.num_micro_batches * len(pricing.model.model.layers)
    for pair in pricing.attention(way, priced.order).sent if not way.outer else ():
        found[pair] += 2 * passes
    for pair in shared_experts(pricing, way).link_bytes if way.experts > 1 and not way.outer else ():
        found[pair] += 4 * passes
    return dict(found)


def beside_spans(pricing: Pricing, priced: Priced) -> dict[tuple[int, int], float]:
    """Bytes of a step that are no spans: of attention, of experts, and what stages send each other."""
    way, found = priced.candidate, Counter[tuple[int, int]]()
    passes = way.num_micro_batches * len(pricing.model.model.layers)
    if way.experts > 1:
        found.update(shared_experts(pricing, way).link_bytes)
    for pair, num_bytes in pricing.attention(way, priced.order).sent.items():
        found[pair] += passes * num_bytes  # type: ignore[assignment]
    if way.stages > 1:
        staged = pricing.staged(way, priced.order)
        for ranks in staged.grid.pipelines(way.stages):
            for own in along_tensor(ranks, way.tensor):
                for (source, target), num_bytes in staged.stages.link_bytes.items():
                    found[own[source], own[target]] += num_bytes  # type: ignore[assignment]
    return dict(found)


def along_tensor(ranks: Sequence[int], tensor: int) -> Iterator[list[int]]:
    """Yield these ranks, and the others of their tensor axes in the same places."""
    for more in range(tensor):
        yield [rank + more for rank in ranks]


def _of_pipeline(stages: Stages, ranks: Sequence[int]) -> Iterator[TraceSpan]:
    timeline = stages.timeline
    for place, own in enumerate(timeline.spans):
        for action, begin, end in own:
            yield TraceSpan(ranks[place], TRAINING, f"{NAMES.get(action.kind, action.kind)} {action}", begin, end)
        if stages.more_s:
            yield TraceSpan(ranks[place], TRAINING, "more micro-batches", timeline.makespan_s, stages.step_s)
    for source, target, what, begin, end in timeline.messages:
        words = str(what) if isinstance(what, Beside) else f"{what.kind} of micro-batch {what.micro_batch}"
        yield TraceSpan(ranks[source], SENDING, words, begin, end, ranks[target])
