"""Plans that spread head and embedding: what is in flight, how long a step takes, and what `check` refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.methods.pipeline import Action, Costs, Limits, Pipeline, Plan, check, fitted, in_flight, plan, simulate
from thinwire.methods.pipeline.costs import SpreadCosts
from thinwire.methods.pipeline.orders import SPREAD_ORDERS

P, M = 4, 32


def spread(made: Plan, head: float, **more: Any) -> Costs:
    """A rank's chunks together take 1 forward and 2 backward; head: of the whole head, in a rank's forwards."""
    num = len(made.home)
    seconds = {"S": head / made.num_ranks, "T": 2 * head / made.num_ranks}
    return replace(Costs.even(num, made.num_ranks / num), spread=SpreadCosts(seconds, **more))


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_each_barrier_is_one_micro_batch_in_flight(barriers: int, num_ranks: int) -> None:
    for num in (1, 2, 3, 8, 32):
        made = SPREAD_ORDERS["1f1b"](num_ranks, num, barriers)
        check(made, Limits(tuple(num_ranks - rank + barriers for rank in range(num_ranks))))
        half = SPREAD_ORDERS["v-half"](num_ranks, num, barriers)
        # 1F1B would hold 2 p of these chunks.
        check(half, Limits(num_ranks + 2 * barriers + 2))
    assert in_flight(made)[0] == num_ranks + barriers
    # All ranks hold as much.
    assert max(in_flight(half)) - min(in_flight(half)) <= 1


# As long as if every stage took its share of the head: 118, 131 and 168; the dossier's simulation of the last stage's.
@pytest.mark.parametrize(
    ("head", "last_s", "most_s"), [(0.5, 153.0, 118.25), (1.0, 201.0, 131.25), (2.4, 335.4, 168.0)]
)
def test_a_head_on_all_stages_takes_as_long_as_stages_that_are_alike(head: float, last_s: float, most_s: float) -> None:
    with_head = (1.0,) * (P - 1) + (1.0 + head,)
    costs = replace(Costs.even(P), forward_s=with_head, input_s=with_head, weight_s=with_head)
    assert simulate(plan("1f1b", P, M), costs).makespan_s == pytest.approx(last_s)
    for order in ("1f1b", "v-half"):
        made = SPREAD_ORDERS[order](P, M, 1)
        assert simulate(made, spread(made, head)).makespan_s <= most_s
    # Idle for no longer than a second barrier's turn more.
    made = SPREAD_ORDERS["1f1b"](P, M, 2)
    assert simulate(made, spread(made, head)).makespan_s <= most_s + 1


def test_embeddings_are_made_one_micro_batch_ahead() -> None:
    for made in (SPREAD_ORDERS["1f1b"](P, 8, 1), SPREAD_ORDERS["v-half"](P, 8, 2)):
        held = peak = 0
        for action in made.orders[0]:
            held += (action.kind == "E") - (action.kind == "F" and action.chunk == 0)
            peak = max(peak, held)
        assert peak == 2
    slow = replace(Costs.even(P), spread=SpreadCosts({"S": 5.0}))
    order = fitted(range(P), [range(P)] * 8, slow, barriers=1).orders[0]
    for number in range(2, 8):
        assert order.index(Action("F", 0, number - 2)) < order.index(Action("E", 0, number))


def deferred(barriers: int) -> Plan:
    made = SPREAD_ORDERS["1f1b"](2, 3, barriers)
    late = [([a for a in order if a.kind != "T"], [a for a in order if a.kind == "T"]) for order in made.orders]
    return replace(made, orders=tuple((*others, *last) for others, last in late))


def test_with_one_barrier_gradients_of_the_head_may_wait() -> None:
    check(deferred(1))
    with pytest.raises(ConfigError, match=r"waits for ever: 1B0 needs the part of micro-batch 0 from rank 0"):
        check(deferred(2))


def test_what_is_missing_or_strange_is_refused() -> None:
    made = SPREAD_ORDERS["1f1b"](2, 2, 1)
    first, second = made.orders
    spoilt = {
        "rank 1: micro-batch 1 has no D": (first, second[:-1]),
        "rank 0: 1S0: its rows are 0": ((*first, Action("S", 1, 0)), second),
        "0S0 stands 2 times": ((*first, Action("S", 0, 0)), second),
        "kinds are F, B, I, W, R, E, S, C, T, D": ((*first, Action("X", 0, 0)), second),
    }
    for message, orders in spoilt.items():
        with pytest.raises(ConfigError, match=message):
            check(replace(made, orders=orders))
    with pytest.raises(ConfigError, match="0E0 is no action: kinds are F, B, I, W, R"):
        check(replace(made, barriers=0))


def test_messages_and_logits_are_counted() -> None:
    made = SPREAD_ORDERS["1f1b"](2, 3, 1)
    sizes = {"hidden": 1.0, "scores": 10.0, "part": 100.0, "rows": 1000.0, "gradient": 10000.0}
    timeline = simulate(made, spread(made, 1.0, sizes=sizes, kept=0.5), Network.even(2, rate=1e9))
    assert timeline.link_bytes == {(0, 1): 3 * (10.0 + 100.0 + 10000.0), (1, 0): 3 * (1.0 + 10.0 + 1000.0)}
    # Logits of at most two micro-batches: of one between S and T, of another that has begun.
    assert all(peak - held in (0.5, 1.0) for peak, held in zip(timeline.peak_bytes, in_flight(made), strict=True))


def test_a_fitted_plan_is_no_slower_than_the_known_order() -> None:
    options = Pipeline(head="spread")
    made = options.plan_of(P, M, known := spread(SPREAD_ORDERS["1f1b"](P, M, 1), 0.5))
    order = SPREAD_ORDERS["1f1b"](P, M, 1)
    assert simulate(made, known).makespan_s <= simulate(order, known).makespan_s
    # Where few may be in flight, the known order is none.
    assert max(in_flight(replace(options, in_flight=2).plan_of(P, 6))) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "gpipe"}, "plan 'gpipe' has no place for its passes; nearest: plan 1f1b"),
        ({"delta": True}, "head 'spread' and delta"),
        ({"recover": "average"}, "head 'spread' with recover 'average': a lost stage's rows"),
        ({"skip": 0.33}, "skip 0.33: .*head 'first'"),
        ({"head": "last", "barriers": 2}, "barriers 2: head 'last' has none; nearest: head 'spread'"),
        ({"barriers": 3}, "barriers"),
    ],
)
def test_options_that_a_spread_head_does_not_have(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pipeline(**{"head": "spread", **options})  # type: ignore[arg-type]
