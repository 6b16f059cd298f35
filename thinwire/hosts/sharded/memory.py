"""Error feedback of the sharded host: what codecs lost of the gradients on this rank, by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from thinwire.collectives.feedback import Estimates, Feedback, Lost
from thinwire.hosts.sharded.bucket import FlatBucket
from thinwire.methods.interface import GradientMemory
from thinwire.methods.sharded import ShardedMethod
from thinwire.state.memory import KeptSpan, MeanMerge, Place, Residual, State

HOPS = ("intra", "inter")


class Memory:
    """The error feedback of each bucket's reduction, and the state that holds it.

    Error feedback is saved by hop, estimates by kind, both by the number of the bucket; any layout can load them. A
    method may bring its own GradientMemory.
    """

    def __init__(self, method: ShardedMethod, buckets: Sequence[FlatBucket]) -> None:
        comm, self.buckets = buckets[0].comm, buckets
        shapes = {slot.name: slot.span.shape for bucket in buckets for slot in bucket.slots}
        self.state = State(Place(shapes, comm.topology, comm.rank))
        self._lost = {
            hop: self.state.add(
                hop, Residual(), spans_of=partial(self._spans, hop), shapes=self._shapes(hop),
                device=buckets[0].live.device,
            )
            for hop in HOPS
        }  # fmt: skip
        # Of each bucket whose gradients travel as differences from an estimate; see Estimates.
        row, device = "estimates of gradients", buckets[0].live.device
        pieces, totals = self._estimated(is_total=False), self._estimated(is_total=True)
        moving = {number: shape for number, shape in pieces.items() if buckets[int(number)].layout.wire.fresh < 1}
        spans, own = partial(self._spans, "inter"), self._own_spans
        self._sent = self.state.add("estimate", MeanMerge(row), spans_of=spans, shapes=pieces, device=device)
        self._total = self.state.add("mean", MeanMerge(f"mean of {row}"), spans_of=own, shapes=totals, device=device)
        merge = MeanMerge("momentum of gradients")
        self._momentum = self.state.add("momentum", merge, spans_of=spans, shapes=moving, device=device)
        self.own: list[GradientMemory | None] = [method.gradient_memory([b.layout.row_numel]) for b in buckets]
        for number, (bucket, memory) in enumerate(zip(buckets, self.own, strict=True)):
            bucket.feedback = partial(self.feedback, number)
            if memory is not None:
                self.state.add_part(f"bucket {number}", memory.state)
        self.planned_bytes = sum(method.memory_bytes(bucket.layout) for bucket in buckets)

    def feedback(self, number: int) -> Feedback | None:
        """Error feedback for a bucket's next reduction; None if there is none."""
        if (memory := self.own[number]) is not None:
            return memory.of([0])
        key = str(number)
        if key in self._sent.shapes():
            # The first momentum is the gradient.
            fresh = 1.0 if self._momentum.get(key) is None else self.buckets[number].layout.wire.fresh
            momentum = self._momentum[key] if key in self._momentum.shapes() else None
            return Estimates(self._sent[key], self._total[key], momentum, fresh)
        held = {hop: kept[key] for hop, kept in self._lost.items() if key in kept.shapes()}
        return Lost(**held) if held else None

    def forget(self) -> None:
        """After a step that all ranks skipped, drop what is not finite, and all estimates.

        Ranks must agree on estimates, so those are dropped as a whole.
        """
        self.state.forget()
        for kept in (self._sent, self._total, self._momentum):
            kept.replace({})

    def _estimated(self, *, is_total: bool) -> dict[str, torch.Size]:
        layouts = {str(i): b.layout for i, b in enumerate(self.buckets) if b.layout.wire.fresh}
        return {
            number: torch.Size([*([] if is_total else layout.lossy_pieces["inter"]), layout.shard_numel])
            for number, layout in layouts.items()
            if "inter" in layout.lossy_pieces
        }

    def _own_spans(self, number: str, shape: torch.Size) -> Iterator[KeptSpan]:
        bucket = self.buckets[int(number)]
        first, ranks = bucket.layout.shard_start(bucket.comm.rank), bucket.num_losses
        for span, start, last in bucket.layout.within(first, first + bucket.layout.shard_numel):
            yield KeptSpan(start - first, start - span.start, last - start, ranks, 1, span.name)

    def _shapes(self, hop: str) -> dict[str, torch.Size]:
        feeding = {str(i): b.layout for i, b in enumerate(self.buckets) if b.layout.wire.feedback}
        return {
            number: torch.Size([*layout.lossy_pieces[hop], layout.shard_numel])
            for number, layout in feeding.items()
            if hop in layout.lossy_pieces
        }

    def _spans(self, hop: str, number: str, shape: torch.Size) -> Iterator[KeptSpan]:
        bucket, held = self.buckets[int(number)], Lost(**{hop: torch.empty(shape, device="meta")})
        grid = bucket.comm.topology
        holders = grid.world_size if hop == "intra" else grid.num_nodes
        for _, start, place, length in held.places(grid, bucket.comm.rank):
            for span, first, last in bucket.layout.within(place, place + length):
                yield KeptSpan(
                    start + first - place, first - span.start, last - first, bucket.num_losses, holders, span.name
                )
