"""What a rank's messages of a pipeline are: who sends them, who takes them, their labels, shapes and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from thinwire.collectives import Label, Mailbox
from thinwire.hosts.pipeline.statistics import StepStatistics
from thinwire.hosts.pipeline.vocabulary import SpreadVocabulary
from thinwire.methods.pipeline import Plan, check
from thinwire.methods.pipeline.border import Crossing, LastMessages
from thinwire.methods.pipeline.plan import RECOMPUTE, Arrival, Bridged, PlanMessage, Shared, direction_of, target_of
from thinwire.methods.pipeline.vocabulary import wide

ShapeAt = Callable[[int, Any], Sequence[int]]


class Wiring:
    """The chunks of a rank, and the messages of a plan by which they are joined to those of other ranks; see Runner."""

    def __init__(
        self, plan: Plan, chunks: Mapping[int, nn.Module], mailbox: Mailbox, shape: ShapeAt, *,
        dtype: torch.dtype = torch.float32, crossing: Crossing | None = None,
        device: torch.device | str = "cpu", last: Mapping[int, LastMessages] | None = None,
        keys: Callable[[Any], Sequence[bytes]] | None = None, vocabulary: SpreadVocabulary | None = None,
    ) -> None:  # fmt: skip
        check(plan)
        self.plan, self.chunks, self.mailbox, self.shape = plan, dict(chunks), mailbox, shape
        self.dtype, self.device = dtype, torch.device(device)
        self.crossing = crossing or Crossing()
        self.order = plan.orders[mailbox.rank]
        self.recomputed = {action.visit for action in self.order if action.kind == RECOMPUTE}
        self.last, self.keys = dict(last or {}), keys
        self._vocabulary = vocabulary
        # Of normalisation, in the step in progress.
        self.statistics = StepStatistics()

    @property
    def vocabulary(self) -> SpreadVocabulary:
        """This rank's part of the vocabulary, in a plan that spreads it over the stages."""
        assert self._vocabulary is not None
        return self._vocabulary

    def sender(self, arrival: PlanMessage) -> int:
        """The rank that sends this message."""
        if isinstance(arrival, Shared):
            return arrival.source
        if isinstance(arrival, Bridged):
            return self.plan.home[arrival.ends[0]]
        routes = self.plan.routes
        visit = (routes.before if arrival.kind == "forward" else routes.after)[arrival.visit]
        assert visit is not None
        return self.plan.home[visit.chunk]

    def target(self, arrival: PlanMessage) -> int:
        """The rank that receives this message."""
        return target_of(arrival, self.plan.home)

    def border(self, arrival: PlanMessage) -> int:
        """The chunk whose output, or its gradient, is sent; messages about the vocabulary have numbers of their own."""
        num = len(self.plan.home)
        if isinstance(arrival, Bridged):
            # Behind the numbers of the vocabulary's messages.
            return num + 2 + 2 * self.plan.num_ranks + self.plan.bridges.index((arrival.source, arrival.target))
        if isinstance(arrival, Shared):
            # What the head is given comes from the last chunk; parts and gradients must draw apart.
            of_kind = {"hidden": num - 1, "rows": num, "part": num + 1, "gradient": num + 1 + self.plan.num_ranks}
            return of_kind[arrival.kind] + {"part": arrival.source, "gradient": arrival.target}.get(arrival.kind, 0)
        before = self.plan.routes.before[arrival.visit]
        if arrival.kind == "backward" or before is None:
            return arrival.chunk
        return before.chunk

    def shape_of(self, arrival: Arrival | Bridged, micro_batch: Any) -> torch.Size:
        """The shape of a message's tensor; what goes over a bridge is shaped as its source's output."""
        chunk = arrival.source if isinstance(arrival, Bridged) else self.border(arrival)
        return torch.Size(self.shape(chunk, micro_batch))

    def label(self, arrival: PlanMessage) -> Label:
        """The label of the message in the mailbox."""
        if isinstance(arrival, Shared):
            # Behind the hops of all chunks.
            place = ("hidden", "scores", "rows", "part", "gradient").index(arrival.kind) * self.plan.num_ranks
            return Label(direction_of(arrival), arrival.micro_batch, len(self.plan.home) + place + arrival.source)
        if isinstance(arrival, Bridged):
            # No vocabulary is spread beside bridges.
            hop = len(self.plan.home) + self.plan.bridges.index((arrival.source, arrival.target))
            return Label(arrival.kind, arrival.micro_batch, hop)
        return Label(arrival.kind, arrival.micro_batch, self.plan.routes.hop[arrival.visit])

    def num_bytes(self, arrival: PlanMessage, micro_batches: Sequence[Any]) -> int:
        """Largest payload of a message in bytes; 0: it is not sent, for the receiver has no row of it."""
        micro_batch, direction = micro_batches[arrival.micro_batch], direction_of(arrival)
        if not isinstance(arrival, Shared):
            num = torch.Size(self.shape_of(arrival, micro_batch)).numel()
            return self.crossing.packet_bytes(direction, num, self.dtype)
        rank = arrival.source if arrival.kind == "rows" else arrival.target
        num = self.vocabulary.num_elements(arrival.kind, rank, micro_batch)
        if arrival.kind == "scores":
            return num * wide(self.dtype).itemsize
        return self.crossing.packet_bytes(direction, num, self.dtype) if num else 0
