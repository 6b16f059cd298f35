"""Tells when a plan that was made for measured links is out of date, and turns plans into text and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

from thinwire.cost import Network
from thinwire.cost.drift import drifted_s
from thinwire.methods.pipeline.plan import Action, Plan
from thinwire.methods.pipeline.simulate import PipelineTimeline


def drifted(planned: Network, now: Network, step: PipelineTimeline) -> str:
    """The link that has drifted most from what a plan was made for, in words; empty if none has.

    Of each link the seconds of a step's messages count, bytes / rate + number * delay; see `drifted_s`. A link on which
    the plan sends nothing counts as if it carried as much as the busiest one, for a new plan might use it.

    step: of the plan, simulated.
    """
    numbers = Counter((source, target) for source, target, *_ in step.messages)
    carried = {pair: (num_bytes, numbers[pair]) for pair, num_bytes in step.link_bytes.items() if num_bytes}
    busiest = max(carried.values(), default=(0.0, 0))
    found = []
    for pair in permutations(range(len(planned.nodes)), 2):
        num_bytes, number = carried.get(pair, busiest)
        links = [(network.rates[pair[0]][pair[1]], network.delays_s[pair[0]][pair[1]]) for network in (planned, now)]
        before_s, now_s = (num_bytes / rate + number * delay_s for rate, delay_s in links)
        if moved_s := drifted_s(before_s, now_s, step.makespan_s):
            was, shown = (f"{rate / 1e6:.3g} MB/s and {1e3 * delay_s:.3g} ms" for rate, delay_s in links)
            found.append((moved_s, f"{pair[0]} to {pair[1]}: {shown} where it was {was}"))
    return max(found)[1] if found else ""


def plan_text(plan: Plan, network: Network) -> dict[str, Any]:
    """A plan, and the links that it was made for, as JSON can hold them."""
    orders = [[str(action) for action in order] for order in plan.orders]
    return {
        "home": plan.home,
        "paths": plan.paths,
        "orders": orders,
        "barriers": plan.barriers,
        "bridges": plan.bridges,
        "links": [network.nodes, network.rates, network.delays_s, network.burst_s],
    }


def plan_from(text: Mapping[str, Any]) -> tuple[Plan, Network]:
    """The inverse of `plan_text`."""
    nodes, rates, delays_s, burst_s = text["links"]
    orders = tuple(tuple(map(_action, order)) for order in text["orders"])
    links = Network(tuple(nodes), _rows(rates), _rows(delays_s), burst_s)
    barriers, bridges = text.get("barriers", 0), [(source, target) for source, target in text.get("bridges", ())]
    return Plan(tuple(text["home"]), _rows(text["paths"]), orders, barriers, tuple(bridges)), links


def _action(text: str) -> Action:
    kind = text.strip("0123456789")
    chunk, micro_batch = map(int, text.split(kind))
    return Action(kind, chunk, micro_batch)


def _rows(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, rows))
