"""The graph of a pipeline's step: as long as its plan by itself, and what replicas exchange while others compute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from thinwire.collectives import Topology
from thinwire.cost import Cores, Machine, Message, Network, Work, simulate as of_graph
from thinwire.cost.graph import CARRY, ROUND
from thinwire.errors import ConfigError
from thinwire.methods.pipeline import Action, Costs, Pipeline, Plan, plan, simulate
from thinwire.methods.pipeline.clock import ActionSpan, PipelineClock
from thinwire.methods.pipeline.costs import SpreadCosts
from thinwire.methods.pipeline.drawn import Joined, draw_step
from thinwire.methods.pipeline.plan import ordered
from thinwire.methods.schedule import BACKWARD, END, FORWARD, Hop, PlannedExchange, PlannedExchanges

FREE = {CARRY: math.inf, ROUND: math.inf, "copy": math.inf}
LINKS = (Network.even(4), Network.even(4, 2.0, 0.1, local_size=2, burst_s=0.3), Network.even(4, 0.6, 0.25))


def costs_of(num_chunks: int) -> Costs:
    """Chunks that differ, so that no two events fall together by themselves."""
    made = Costs.even(num_chunks, forward_bytes=1.3, backward_bytes=0.7)
    forward_s, input_s = (tuple(base + 0.017 * chunk for chunk in range(num_chunks)) for base in (1.0, 1.1))
    spread = SpreadCosts(
        {"S": 0.3, "T": 0.4}, {"hidden": 1.1, "scores": 0.2, "part": 0.9, "rows": 0.3, "gradient": 0.2}
    )
    return replace(made, forward_s=forward_s, input_s=input_s, spread=spread)


def machine(network: Network, cores: Cores | None = None, rates: Mapping[str, float] | None = None) -> Machine:
    ranks = tuple(range(len(network.nodes)))
    own = cores or Cores(ranks, (math.inf,) * len(ranks))
    return Machine(("a",) * len(ranks), network, own, FREE | dict(rates or {}))


def on_clock(made: Plan, costs: Costs, network: Network) -> list[list[ActionSpan]]:
    """What ranks do on the clock that fits orders, if they do the plan's."""
    left = [list(order) for order in made.orders]

    def next_of_order(rank: int, clock: PipelineClock) -> Action | None:
        return left[rank].pop(0) if left[rank] and clock.can_start(left[rank][0]) else None

    return PipelineClock(made.home, made.paths, 4, costs, network, made.barriers, made.bridges).run(next_of_order)


def times_of(spans: Sequence[Sequence[ActionSpan]]) -> list[float]:
    """When actions begin and end, rank after rank."""
    return [when for own in spans for _, *times in own for when in times]


CASES = [
    ("1f1b", 8), ("gpipe", 5), ("zbv", 8), ("interleaved", 8), ("fitted", 7), ("1f1b recomputed", 6),
    ("1f1b spread", 5), ("fitted first", 5), ("fitted skipping", 6), ("fitted tied", 5),
]  # fmt: skip


@pytest.mark.parametrize("links", range(len(LINKS)))
@pytest.mark.parametrize(("name", "num"), CASES, ids=[name for name, _ in CASES])
def test_a_graph_takes_as_long_as_its_plan_by_itself(name: str, num: int, links: int) -> None:
    order, *more = name.split()
    stated = {"spread": {"head": "spread"}, "first": {"head": "first"}, "skipping": {"head": "first", "skip": 0.34}}
    options = Pipeline(plan=order, **(stated.get(more[0], {}) if more else {}))  # type: ignore[arg-type]
    if "recomputed" in more:
        options = replace(options, recompute="always")
    network = LINKS[links]
    costs = costs_of(len(options.home(4)))
    if "tied" in more:
        costs = replace(costs, tied_bytes=2.0, copies=((0, 1, 0.5), (3, 2, 0.5)))
    made = options.plan_of(4, num, costs, network)
    step = draw_step(made, costs, network.nodes)
    for cores in (None, Cores((0, 0, 1, 1), (1.5, 1.0), 0.2)):
        found, alone = of_graph(step.graph, machine(network, cores)), simulate(made, costs, network, cores)
        assert found.makespan_s == pytest.approx(alone.makespan_s, rel=1e-9)
        times = [when for tasks in step.pipeline.actions for task in tasks for when in found.spans[task]]
        assert times == pytest.approx(times_of(alone.spans), rel=1e-9)
        if cores is None:
            clock = on_clock(made, costs, network)
            assert tuple(tuple(action for action, _, _ in own) for own in clock) == alone.orders == made.orders
            assert times == pytest.approx(times_of(clock), rel=1e-9)
    sent = Counter[tuple[int, int]]()
    for task in step.graph.tasks:
        if isinstance(task.does, Message):
            sent[task.rank, task.does.target] += task.does.num_bytes  # type: ignore[assignment]
    assert dict(sent) == pytest.approx(step.pipeline.link_bytes())
    assert alone.link_bytes == step.pipeline.link_bytes()


def test_packing_is_work_of_both_ends() -> None:
    made, costs = plan("1f1b", 2, 1), Costs.even(2, forward_bytes=2.0, backward_bytes=3.0)
    step = draw_step(made, costs, (0, 1), {"forward": "int8", "backward": "int4"})
    rates = {"encode int8": 1.0, "decode int8": 2.0, "encode int4": 1.0, "decode int4": 3.0}
    found = of_graph(step.graph, machine(Network.even(2), rates=rates))
    assert found.makespan_s == pytest.approx(6.0 + 2 + 1 + 3 + 1)
    assert found.kinds_s(1)["decode"] == pytest.approx(1.0) and found.kinds_s(0)["encode"] == pytest.approx(2.0)
    assert step.graph.sent(0) == {("pipeline_forward", "inter"): 2.0}
    assert step.graph.sent(1) == {("pipeline_backward", "inter"): 3.0}
    # What all stages share is packed once for all of them, and scores are not packed.
    spread = Pipeline(plan="1f1b", head="spread").plan_of(3, 1)
    graph = draw_step(spread, costs_of(3), (0, 1, 2), {"forward": "int8"}).graph
    kinds = Counter((task.rank, task.does.kind) for task in graph.tasks if isinstance(task.does, Work))
    assert kinds[2, "encode int8"] == 2 and kinds[1, "decode int8"] == 2


def joined(sizes: Sequence[float], weights: float = 0.0, words: float = 0.0) -> Joined:
    """Replicas of two nodes that exchange gradients of these bytes, by stage, after weights."""
    each = []
    for size in sizes:
        before = PlannedExchange("weights", FORWARD, (Hop("inter", weights),))
        after = PlannedExchange("gradients", BACKWARD, (Hop("inter", size),))
        each.append(PlannedExchanges((1.0,), (before, after) if weights else (after,), kept_bytes=1.0))
    said = PlannedExchanges((), (PlannedExchange("word", END, (Hop("inter", words),)),) if words else ())
    return Joined(tuple(each), Topology(2, 1), said, Topology(2 * len(sizes), 1))


def seconds(found: Joined) -> tuple[float, float]:
    """Of a step of two stages, one micro-batch and two replicas on links of 1 byte a second; of its pipelines alone."""
    made, network = plan("1f1b", 2, 1), Network.even(4, 1.0)
    step = draw_step(made, Costs.even(2), network.nodes, joined=found)
    timeline = of_graph(step.graph, machine(network))
    return timeline.makespan_s, max(timeline.spans[task][1] for task in step.pipeline.ends[0])


def test_gradients_leave_while_other_stages_compute() -> None:
    # The last stage's backward ends at 4 s, the first one's at 6 s.
    assert seconds(joined((10.0, 10.0))) == (16.0, 6.0)
    assert seconds(joined((10.0, 20.0))) == (24.0, 6.0)
    assert seconds(joined((10.0, 12.0))) == (16.0, 6.0)
    # Weights come before the first forward; those of the last stage while the first one computes.
    assert seconds(joined((10.0, 10.0), weights=0.5)) == (16.5, 6.5)
    # All ranks agree once all gradients are there; each sends the word three times.
    assert seconds(joined((10.0, 20.0), words=3.0)) == (27.0, 6.0)


def test_an_order_in_which_ranks_wait_for_each_other_is_told() -> None:
    made = plan("1f1b", 2, 1)
    turned = replace(made, orders=(made.orders[0], ordered([("B", 1, 0), ("F", 1, 0)])))
    with pytest.raises(ConfigError, match="wait for each other for ever: 0B0 on rank 0, 1B0 on rank 1"):
        draw_step(turned, Costs.even(2), (0, 1))
