"""Plans: their published makespans and peaks, and what `check` refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.methods.pipeline import (
    ORDERS,
    Action,
    Costs,
    Limits,
    Pipeline,
    Plan,
    check,
    fitted,
    in_flight,
    plan,
    recompute,
    simulate,
)
from thinwire.methods.pipeline.clock import PipelineClock
from thinwire.methods.pipeline.costs import SpreadCosts
from thinwire.methods.pipeline.drift import plan_from, plan_text
from thinwire.methods.pipeline.orders import from_torch
from thinwire.methods.pipeline.recompute import fastest_within, mode_of


def even(made: Plan, **costs: float) -> Costs:
    """A rank's chunks together take 1 forward and 2 backward."""
    num_chunks = len(made.home)
    return Costs.even(num_chunks, made.num_ranks / num_chunks, **costs)


# Forward 1, backward 2: GPipe and Megatron's dossiers, and torch's own orders on this clock.
@pytest.mark.parametrize(
    ("order", "num_ranks", "num_micro_batches", "chunks", "makespan_s", "peaks"),
    [
        ("gpipe", 4, 8, 1, 33.0, [8, 8, 8, 8]),
        ("gpipe", 8, 32, 1, 117.0, [32] * 8),
        ("gpipe", 4, 1, 1, 12.0, [1, 1, 1, 1]),
        ("1f1b", 4, 8, 1, 33.0, [4, 3, 2, 1]),
        ("1f1b", 4, 2, 1, 15.0, [2, 2, 2, 1]),
        ("interleaved", 4, 8, 2, 28.5, [11, 9, 7, 5]),
        ("interleaved", 4, 8, 4, 26.25, [19, 17, 15, 13]),
        ("interleaved", 2, 4, 2, 13.5, [5, 3]),
        ("looped-bfs", 4, 8, 2, 28.5, [16] * 4),
        ("interleaved-zb", 4, 8, 2, 25.5, [8] * 4),
        ("zbv", 4, 8, 2, 25.5, [8] * 4),
        ("dualpipe-v", 4, 8, 2, 25.5, [9] * 4),
        ("v-half", 4, 8, 2, 29.5, [6, 7, 6, 7]),
        ("v-half", 8, 16, 2, 60.0, [10, 11] * 4),
    ],
)
def test_makespans_and_peaks(
    order: str, num_ranks: int, num_micro_batches: int, chunks: int, makespan_s: float, peaks: list[int]
) -> None:
    made = plan(order, num_ranks, num_micro_batches, chunks)
    check(made)
    timeline = simulate(made, even(made))
    assert timeline.makespan_s == makespan_s
    assert list(in_flight(made)) == peaks == [int(peak) for peak in timeline.peak_bytes]
    assert timeline.idle_s == tuple([makespan_s - 3 * num_micro_batches] * num_ranks)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_every_order_can_run_or_says_which_number_it_takes(order: str, num_ranks: int, num_micro_batches: int) -> None:
    try:
        made = plan(order, num_ranks, num_micro_batches)
    except ConfigError as error:
        near = int(str(error).rpartition("nearest that works: ")[2])
        assert order not in ("gpipe", "1f1b", "v-half")
        made = plan(order, num_ranks, near)
    check(made)


def test_the_one_f_one_b_table_of_torch_is_refused() -> None:
    """Its last rank begins with micro-batch 1 and ends with one that does not exist."""
    with pytest.raises(ConfigError, match="micro-batch 0 at chunk 3 \\(rank 3\\) has no forward"):
        check(from_torch("1F1B", 1, 4, 8))


def test_a_bubble_on_unequal_stages_is_that_of_the_slowest() -> None:
    costs = replace(
        Costs.even(4), forward_s=(1.0, 1.0, 1.0, 2.0), input_s=(1.0, 1.0, 1.0, 2.0), weight_s=(1.0,) * 3 + (2.0,)
    )
    timeline = simulate(plan("gpipe", 4, 8), costs)
    assert timeline.makespan_s == 3 + 8 * 6 + 3 * 2
    assert timeline.idle_s[3] == 9.0


def test_messages_take_their_time_and_are_counted() -> None:
    made = plan("gpipe", 2, 2)
    costs = even(made, forward_bytes=10.0, backward_bytes=5.0)
    timeline = simulate(made, costs, Network.even(2, rate=10.0, delay_s=0.25))
    # Rank 1 has its first input at 2.25 and computes until 8.25; the last gradient is at rank 0 at 9.
    assert timeline.makespan_s == 11.0
    assert timeline.link_bytes == {(0, 1): 20.0, (1, 0): 10.0}


def test_a_tied_weight_travels_before_the_last_rank_works_and_its_gradient_ends_the_step() -> None:
    made, links = plan("gpipe", 2, 1), Network.even(2, rate=10.0)
    timeline = simulate(made, replace(Costs.even(2), tied_bytes=100.0), links)
    # Sent at 1, there at 11; forward and backward until 14, and the gradient is back at 24.
    assert [begin for _, begin, _ in timeline.spans[1]] == [11.0, 12.0] and timeline.makespan_s == 24.0
    assert timeline.link_bytes == {(0, 1): 100.0, (1, 0): 100.0} and timeline.idle_s == (21.0, 21.0)
    assert len(timeline.messages) == 4 and simulate(made, Costs.even(2), links).makespan_s == 6.0
    # Both ends on one rank share a weight without a message.
    both = plan("v-half", 2, 2)
    assert simulate(both, replace(Costs.even(4), tied_bytes=100.0), links) == simulate(both, Costs.even(4), links)
    # A copy for a recovery is in front of the messages of its link, and nothing waits for it.
    costs = replace(Costs.even(2, forward_bytes=10.0), copies=((0, 1, 40.0),))
    timeline = simulate(made, costs, links)
    assert timeline.makespan_s == 4 + 1 + 1 + 2 + 1 + 2 and timeline.link_bytes[0, 1] == 50.0
    alone = replace(Costs.even(2), copies=((1, 0, 1e3),))
    assert simulate(plan("gpipe", 2, 1), alone, links).makespan_s > 6.0


def test_torch_orders_keep_their_ranks() -> None:
    assert plan("zbv", 4, 8).home == (0, 1, 2, 3, 3, 2, 1, 0)
    assert plan("interleaved", 4, 8).home == (0, 1, 2, 3, 0, 1, 2, 3)


def spoilt(kind: str) -> Plan:
    made = plan("1f1b", 2, 2)
    first, second = made.orders
    return {
        "missing": replace(made, orders=(first[:-1], second)),
        "twice": replace(made, orders=((*first, first[0]), second)),
        "elsewhere": replace(made, orders=((*first, Action("F", 1, 0)), second)),
        "stranger": replace(made, orders=((*first, Action("F", 0, 7)), second)),
        "kind": replace(made, orders=((*first, Action("X", 0, 0)), second)),
        "half": replace(made, orders=(first, (*second, Action("W", 1, 0)))),
        "circle": replace(made, orders=(first, (second[2], second[3], second[0], second[1])[::-1])),
        "home": replace(made, home=(0, 5)),
        "empty": replace(made, home=(0, 0)),
        "path": replace(made, paths=((0, 1), (0, 1, 0))),
        "nowhere": replace(made, paths=((0, 1), (0, 2))),
        "late": replace(made, orders=(first, (*second, Action("R", 1, 0)))),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "micro-batch 1 at chunk 0 \\(rank 0\\) has as its backward none"),
        ("twice", "0F0 stands 2 times"),
        ("elsewhere", "1F0 belongs to rank 1"),
        ("stranger", "micro-batch 7 does not visit chunk 0"),
        ("kind", "0X0 is no action: kinds are F, B, I, W, R"),
        ("half", "has as its backward B and W: it needs B alone, or both I and W"),
        ("circle", "rank 1 waits for ever: 1B0 needs 1F0"),
        ("home", "chunk 1 lives on rank 5: ranks are 0 to 1"),
        ("empty", "rank 1 holds no chunk"),
        ("path", "micro-batch 1 visits chunk 0 more than once"),
        ("nowhere", "micro-batch 1 visits chunk 2, which does not exist"),
        ("late", "1R0 comes after the backward"),
    ],
)
def test_what_can_not_run_is_refused(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(spoilt(kind))


def test_limits_hold_for_each_rank() -> None:
    made = plan("1f1b", 4, 8)
    check(made, Limits((4, 3, 2, 1)))
    with pytest.raises(ConfigError, match="rank 0 holds 4 activations at once: at most 3"):
        check(made, Limits(3))
    with pytest.raises(ConfigError, match="limits of 2 ranks for a plan of 4"):
        check(made, Limits((1, 2)))


@pytest.mark.parametrize(
    ("order", "numbers", "message"),
    [
        ("1f1f", (4, 8, None), "did you mean '1f1b'"),
        ("interleaved", (4, 9, None), "nearest that works: 10"),
        ("dualpipe-v", (4, 4, None), "nearest that works: 8"),
        ("zbv", (4, 8, 3), "nearest that it takes: 2"),
        ("gpipe", (0, 8, None), "at least 1"),
    ],
)
def test_numbers_that_an_order_can_not_take(order: str, numbers: Sequence[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(order, *numbers)


# Half a second of a step's messages at 100 Mbit/s and 150 ms of computing for each micro-batch, as measured once.
SLOW = Network.even(4, rate=12.5e6, delay_s=0.0005)
HELD = Costs.even(4, 0.05, forward_bytes=0.52e6, kept_bytes=1.0)


def test_fitted_hides_the_links_that_one_f_one_b_waits_for() -> None:
    made = fitted(range(4), [range(4)] * 32, HELD, SLOW, in_flight=8)
    check(made, Limits(8))
    free = simulate(plan("1f1b", 4, 32), HELD).makespan_s
    assert simulate(made, HELD, SLOW).makespan_s < 1.06 * free
    assert simulate(plan("1f1b", 4, 32), HELD, SLOW).makespan_s > 1.35 * free


def test_fitted_is_the_same_each_time_and_runs_as_it_was_scheduled() -> None:
    one, two = (fitted(range(4), [range(4)] * 9, HELD, SLOW, in_flight=3) for _ in range(2))
    assert one == two
    assert simulate(one, HELD, SLOW).orders == one.orders
    assert max(in_flight(one)) <= 3


def test_fitted_takes_halves_chunks_that_share_a_rank_and_paths_of_their_own() -> None:
    halves = fitted(range(4), [range(4)] * 8, Costs.even(4), halves=True)
    check(halves)
    assert simulate(halves, Costs.even(4)).makespan_s == 27.0
    # Skips and swaps, and back to rank 0 for the head.
    skipping = fitted((0, 1, 2, 3, 0), [(0, 1, 3, 4), (0, 2, 1, 4), (0, 3, 2, 4), (0, 1, 2, 3, 4)], Costs.even(5))
    check(skipping)
    with pytest.raises(ConfigError, match="in_flight 0"):
        fitted(range(2), [range(2)], Costs.even(2), in_flight=0)


def test_making_a_fitted_plan_takes_as_long_for_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = [0]
    can_start = PipelineClock.can_start

    def counted(clock: PipelineClock, action: Action) -> bool:
        looked[0] += 1
        return can_start(clock, action)

    monkeypatch.setattr(PipelineClock, "can_start", counted)
    for barriers in (0, 1):
        numbers = []
        for num in (64, 128):
            looked[0] = 0
            fitted(range(4), [range(4)] * num, HELD, SLOW, barriers=barriers)
            numbers.append(looked[0])
        assert numbers[1] < 2.2 * numbers[0]


@pytest.mark.parametrize(
    "name",
    ["forward_s", "input_s", "weight_s", "forward_bytes", "backward_bytes", "kept_bytes", "input_bytes", "tied_bytes"],
)
def test_costs_that_are_no_seconds_or_bytes_are_refused(name: str) -> None:
    whole = Costs.even(2)
    for value in (-1.0, math.nan):
        each: Any = value if name == "tied_bytes" else (1.0, value)
        with pytest.raises(ConfigError, match=f"{name} {value:g}: must be a number, at least 0"):
            replace(whole, **{name: each})
    with pytest.raises(ConfigError, match=r"(?s)2 problems:.*input_s -1: .*copies nan: must"):
        replace(whole, input_s=(-1.0, -1.0), copies=((0, 1, math.nan),))
    wrongs: list[dict[str, Any]] = [{"seconds": {"S": -1.0}}, {"sizes": {"score": math.nan}}, {"kept": -1.0}]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="must be a number, at least 0"):
            SpreadCosts(**wrong)


def test_a_plan_is_the_same_as_text() -> None:
    bridged = replace(plan("1f1b", 4, 3), bridges=((0, 2), (1, 3)))
    others = (Pipeline(head="spread", barriers=2), Pipeline(recompute="always"))
    for made in (bridged, *(options.plan_of(4, 3) for options in others)):
        assert plan_from(json.loads(json.dumps(plan_text(made, SLOW)))) == (made, SLOW)


def test_fitted_says_when_ranks_would_wait_for_each_other() -> None:
    # Rank 1 is full of what rank 2 must take, and rank 2 of what rank 1 must take.
    with pytest.raises(ConfigError, match="in_flight 1 is too few for these paths"):
        fitted((0, 1), [(0, 1), (1, 0)], Costs.even(2), in_flight=1)


def test_as_many_more_micro_batches_as_stages_keep_the_pace() -> None:
    def bubble(num_ranks: int, num: int) -> float:
        """Idle time over the time of the work."""
        return simulate(plan("1f1b", num_ranks, num), Costs.even(num_ranks)).makespan_s / (3 * num) - 1

    few, more, worse = bubble(4, 16), bubble(8, 32), bubble(8, 16)
    assert (few, more, worse) == pytest.approx((3 / 16, 7 / 32, 7 / 16))
    assert (1 + more) / (1 + few) < 1.03 and (1 + worse) / (1 + few) == pytest.approx(1.21, abs=0.01)


def test_recomputing_costs_a_forward_and_keeps_inputs_alone() -> None:
    made = plan("gpipe", 4, 8)
    costs = Costs.even(4, kept_bytes=10.0, input_bytes=1.0)
    always = recompute(made, "always")
    check(always)
    # Of each rank's eight more forwards none finds time to hide in on the last rank.
    assert simulate(always, costs).peak_bytes == (17.0,) * 4
    assert simulate(made, costs).peak_bytes == (80.0,) * 4
    assert simulate(always, costs).makespan_s == 33.0 + 8
    last = recompute(plan("1f1b", 4, 8), "except-last")
    check(last)
    assert [sum(action.kind == "R" for action in order) for order in last.orders] == [7, 7, 7, 0]
    assert recompute(made, "never") is made
    with pytest.raises(ConfigError, match="did you mean 'always'"):
        recompute(made, "alway")
    with pytest.raises(ConfigError, match="recomputes already"):
        recompute(always, "always")


@pytest.mark.parametrize(
    ("room", "mode"),
    [(None, "never"), ([40.0] * 4, "never"), ([39.0] * 4, "except-last"), ([22.0, 21.0, 19.0, 10.0], "always"),
     ([0.0] * 4, "always")],
)  # fmt: skip
def test_what_is_computed_again_is_the_fastest_that_fits(room: list[float] | None, mode: str) -> None:
    made, costs = plan("1f1b", 4, 8), Costs.even(4, kept_bytes=10.0, input_bytes=1.0)
    found = fastest_within(made, costs, None, room)
    assert mode_of(found) == mode and found == recompute(made, mode)
    assert Pipeline(plan="1f1b", recompute="auto").plan_of(4, 8, costs, None, room) == found
