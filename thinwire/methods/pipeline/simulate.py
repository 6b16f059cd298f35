"""Simulates a plan: when each rank does what, from the costs of layers and the rates of links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.cost import Cores, Drawing, Machine, Network, simulate as times_of
from thinwire.methods.pipeline.clock import check_sizes
from thinwire.methods.pipeline.costs import Costs, peak_bytes
from thinwire.methods.pipeline.drawn import DrawnPlan
from thinwire.methods.pipeline.plan import Action, Beside, Plan, PlanMessage


@dataclass(frozen=True)
class PipelineTimeline:
    """The simulated times of a plan.

    spans: for each rank (action, start, end) in seconds. link_bytes: by (from, to), in one step. peak_bytes: for each
    rank, the most activations that it holds at once. messages: (from, to, what, sent, arrived). tied_s: when the
    gradients of tied weights have arrived; 0 without.
    """

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    link_bytes: dict[tuple[int, int], float]
    peak_bytes: tuple[float, ...]
    messages: tuple[tuple[int, int, PlanMessage | Beside, float, float], ...] = ()
    tied_s: float = 0.0

    @property
    def makespan_s(self) -> float:
        """Seconds from the first action's start to the last one's end, or to the arrival of tied gradients."""
        return max([self.tied_s, *(span[-1][2] for span in self.spans if span)])

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each rank computes nothing."""
        return tuple(self.makespan_s - sum(end - start for _, start, end in span) for span in self.spans)

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank, in order."""
        return tuple(tuple(action for action, _, _ in span) for span in self.spans)


def trace(spans: Sequence[Sequence[tuple[Action, float, float]]], name: str) -> list[dict[str, Any]]:
    """The times of all ranks in Chrome's trace format, which Perfetto reads too; one process per rank.

    spans: see PipelineTimeline. name: of the row in each rank's process.
    """
    return [
        {
            "name": f"{action.kind}{action.micro_batch}", "cat": action.kind, "ph": "X", "pid": rank, "tid": name,
            "ts": 1e6 * begin, "dur": 1e6 * (end - begin), "args": {"chunk": action.chunk},
        }
        for rank, own in enumerate(spans)
        for action, begin, end in own
    ]  # fmt: skip


def simulate(plan: Plan, costs: Costs, network: Network | None = None, cores: Cores | None = None) -> PipelineTimeline:
    """The timeline of a plan that passes `check`: each rank runs its next action as soon as its input has arrived.

    A message is sent when its action ends, and travels while ranks compute. It is the graph of `draw_step` for one
    pipeline alone, whose packing takes no time.

    Args:
        network: of the plan's ranks; None: messages take no time.
        cores: shared by the ranks; None: each has its own.

    Raises ConfigError for costs or a network of another size.
    """
    check_sizes(plan.home, plan.num_ranks, costs, network)
    ranks, links = tuple(range(plan.num_ranks)), network or Network.even(plan.num_ranks)
    drawing = Drawing(plan.num_ranks)
    made = DrawnPlan(drawing, plan, costs, ranks, links.nodes, carries=False)
    machine = Machine(("",) * len(ranks), links, cores or Cores(ranks, (math.inf,) * len(ranks)), {})
    found = times_of(drawing.done(), machine).spans
    spans = tuple(
        tuple((action, *found[task]) for action, task in zip(order, tasks, strict=True))
        for order, tasks in zip(plan.orders, made.actions, strict=True)
    )
    messages = [(source, target, what, *found[task]) for task, (source, target, what, _) in made.sent.items()]
    messages.sort(key=lambda message: message[-1])
    tied = (end_s for _, _, what, _, end_s in messages if isinstance(what, Beside) and what.kind == "gradient")
    return PipelineTimeline(
        spans, made.link_bytes(), peak_bytes(plan.orders, costs), tuple(messages), max(tied, default=0.0)
    )  # fmt: skip
