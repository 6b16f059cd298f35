"""The simulated step of a plan as spans of time, and the bytes that it sends over each link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from thinwire.cost.simulator import TRAINING
from thinwire.cost.trace import TraceSpan
from thinwire.planner.islands import islands_of, links_between
from thinwire.planner.mixture import shared_experts
from thinwire.planner.pricing import Pricing
from thinwire.planner.search import Priced


def spans_of(pricing: Pricing, priced: Priced) -> Iterator[TraceSpan]:
    """Yield what each rank does in the simulated step of a candidate.

    The ranks of a tensor axis do all the same; messages inside layers stand in the time of these. Of a long step of a
    pipeline the first part is drawn, and what is left behind it.
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
        yield from shared_experts(pricing, way, priced.order).timeline.pieces(priced.order)
        return
    if way.stages == 1:
        timeline, (group,) = pricing.simulated(way, priced.order), pricing.placed(priced.order, way.tensor).groups(1)
        for ranks in along_tensor(group, way.tensor):
            yield from timeline.pieces(ranks)
        return
    staged = pricing.staged(way, priced.order)
    timeline, more_s = staged.stages.timeline, staged.stages.more_s
    for ranks in along_tensor(staged.ranks, way.tensor):
        yield from timeline.pieces(ranks)
        for rank in ranks if more_s else ():
            yield TraceSpan(rank, TRAINING, "more micro-batches", timeline.makespan_s, timeline.makespan_s + more_s)


def link_bytes(pricing: Pricing, priced: Priced) -> dict[tuple[int, int], float]:
    """Bytes of one step, by (from rank, to rank), without those of torch on a tensor axis."""
    way, found = priced.candidate, Counter[tuple[int, int]]()
    for span in spans_of(pricing, priced) if way.stages == 1 else ():
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
    """Bytes of a step that are no spans: of attention and of experts; and all of a step with stages, of which spans may
    show a part.
    """
    way, found = priced.candidate, Counter[tuple[int, int]]()
    passes = way.num_micro_batches * len(pricing.model.model.layers)
    if way.experts > 1:
        for (a, b), num_bytes in shared_experts(pricing, way, priced.order).link_bytes.items():
            found[priced.order[a], priced.order[b]] += num_bytes  # type: ignore[assignment]
    for pair, num_bytes in pricing.attention(way, priced.order).sent.items():
        found[pair] += passes * num_bytes  # type: ignore[assignment]
    if way.stages > 1:
        staged = pricing.staged(way, priced.order)
        for own in along_tensor(staged.ranks, way.tensor):
            for (source, target), num_bytes in staged.link_bytes().items():
                found[own[source], own[target]] += num_bytes  # type: ignore[assignment]
    return dict(found)


def along_tensor(ranks: Sequence[int], tensor: int) -> Iterator[list[int]]:
    """Yield these ranks, and the others of their tensor axes in the same places."""
    for more in range(tensor):
        yield [rank + more for rank in ranks]
