"""Tutel's dictionary, by seconds that are stated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from thinwire.cost.links import Line, Links
from thinwire.methods.experts import MEASURE, ExpertParallel, ExpertPlacement, Rows, WayDictionary, sent, way_text
from thinwire.methods.experts.choice import choose_way, layer_streams_s, pass_s
from thinwire.methods.experts.dictionary import WINDOW

PLACE = ExpertPlacement(8, 4)
ROWS = Rows.even(PLACE, 512, 2, 32, torch.float32, 2)
LINKS = replace(Links.stated(1e8, 1e9, 0.0, 2), product=Line(0.0, 2e-10))
OPEN = ExpertParallel(4, move="auto", route="auto")
SIZES: dict[str, Any] = {"part_numel": 3 * 8 * 48 * 32 // 4, "local_size": 2}


def made() -> WayDictionary:
    first = next(iter(choose_way(OPEN, PLACE, ROWS, links=LINKS, **SIZES)))
    return WayDictionary(OPEN, first, PLACE, passes=3, links=LINKS, **SIZES)


def steps(ways: WayDictionary, seconds: dict[str, float], num: int, factor: float = 1.0) -> list[str]:
    """The ways of so many steps, each of which takes the seconds of its way; others take 1."""
    found = []
    for _ in range(num):
        found.append(way_text(ways.ways[ways.now]))
        # The first step of a way warms up.
        is_warm = len(found) > 1 and found[-2] == found[-1]
        told = ways.note(seconds.get(found[-1], 1.0) if is_warm else 9.0, ROWS, factor)
        if told == MEASURE:
            found.append("measure")
            return found
        ways.take(told)
    return found


def test_each_way_near_the_prediction_is_tried_once_and_the_fastest_measured_is_taken() -> None:
    ways = made()
    predicted = [way_text(way) for way in choose_way(OPEN, PLACE, ROWS, links=LINKS, **SIZES)]
    best = way_text(ways.ways[ways.load(ROWS, 1.0).untried[-1]])
    taken = steps(ways, {best: 0.5}, 20)
    tried = list(dict.fromkeys(taken))
    # In the order of their predictions, two steps each, and then no other.
    assert taken[0] == predicted[0] != best and 2 < len(tried) <= 6
    assert tried == predicted[: len(tried)] and taken[: 2 * len(tried)] == [way for way in tried for _ in range(2)]
    assert taken[2 * len(tried)] == best and set(taken[2 * len(tried) :]) == {best}


def test_close_ways_are_tried_again_and_one_chunk_always() -> None:
    options = ExpertParallel(4, chunks="auto")
    first = next(iter(choose_way(options, PLACE, ROWS, links=LINKS, **SIZES)))
    ways = WayDictionary(options, first, PLACE, passes=1, links=LINKS, **SIZES)
    one, many = "tokens, linear, 1 chunk", way_text(first)
    assert many != one and [way_text(ways.ways[way]) for way in ways.load(ROWS, 1.0).untried] == [many, one]
    taken = steps(ways, {many: 0.6, one: 0.5}, 20)
    # In turns, until each was measured three times.
    assert taken[:12] == ([many] * 2 + [one] * 2) * 3 and set(taken[12:]) == {one}


def test_each_message_of_a_way_has_its_name_and_its_seconds() -> None:
    place = ExpertPlacement(8, 4, 2)
    rows = Rows.even(place, 512, 2, 32, torch.float32, 2, passes=4)
    links = replace(LINKS, product=Line())
    moved = {"expert_weights", "expert_weight_gradients"}
    ways = {"dispatch", "combine", "combine_gradients", "dispatch_gradients"}
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({}, ways), ({"route": "2dh"}, ways), ({"move": "slices"}, ways | moved),
        ({"move": "experts"}, moved),
    ]  # fmt: skip
    for options, names in cases:
        way = ExpertParallel(4, 2, **options)
        found = layer_streams_s(way, place, rows, links=links, **SIZES)
        assert {name for name, _ in found} == names and all(seconds > 0 for seconds in found.values())
        whole_s = sum(pass_s(way, place, rows, links=links, **SIZES, is_backward=back) for back in (False, True))
        # In one chunk the messages follow each other; of two levels some are under way at once.
        assert max(found.values()) <= whole_s < 1.001 * sum(found.values())
        if moved & names:
            once = layer_streams_s(replace(way, once_a_step=True), place, rows, links=links, **SIZES)
            assert all(once[key] == pytest.approx(found[key] / (4 if key[0] in moved else 1)) for key in found)
    ways_of_run = made()
    load = ways_of_run.load(ROWS, 1.0)
    layer_s = layer_streams_s(ways_of_run.ways[ways_of_run.now], PLACE, ROWS, links=LINKS, **SIZES)
    assert ways_of_run.streams(load, ROWS) == {key: 3 * seconds for key, seconds in layer_s.items()}


def test_in_each_layer_ranks_wait_for_its_own_busiest_expert() -> None:
    """Two layers with other hot experts, and an even one: on average the router is nearly even."""
    layers = [[340 if expert == busy else 97 for expert in range(8)] for busy in (0, 7)] + [[128] * 8]
    average = [sum(each) // 3 for each in zip(*layers, strict=True)]
    one = ExpertParallel(4)

    def seconds(*counts: list[int]) -> float:
        rows = [ROWS.uneven([each] * 4) for each in counts]
        return choose_way(one, PLACE, rows, links=LINKS, **SIZES)[one]

    assert seconds(*layers) == pytest.approx(sum(map(seconds, layers)) / 3)
    assert seconds(*layers) > 1.2 * seconds(average)
    # Layers that are computed again send a forward's rows twice, and take its seconds twice.
    again = replace(ROWS, forwards=2)
    way, both = ExpertParallel(4, route="once"), (SIZES["part_numel"], SIZES["local_size"])
    forward, trained, recomputed = (
        sum(sent(PLACE, rows, way, *both, in_training=trains).values())
        for rows, trains in ((ROWS, False), (ROWS, True), (again, True))
    )
    assert recomputed == trained + forward > trained
    once_s, twice_s = (choose_way(one, PLACE, rows, links=LINKS, **SIZES)[one] for rows in (ROWS, again))
    forward_s = pass_s(one, PLACE, ROWS, *both, LINKS, is_backward=False)
    assert twice_s == pytest.approx(once_s + forward_s)
    # No more tokens enter a node than have rows there, and all that have.
    few = ROWS.uneven([[0] * 4 + [512, 512, 0, 0]] * 4)
    assert few.entering == [[0, 512]] * 4 and few.counts[0][4] == 512


def test_another_load_has_an_entry_of_its_own_and_an_equal_one_none() -> None:
    ways = made()
    first, last = (way_text(ways.ways[ways.load(ROWS, 1.0).untried[n]]) for n in (0, -1))
    steps(ways, {last: 0.5}, 16)
    assert len(ways.loads) == 1 and set(steps(ways, {last: 0.5}, 4, factor=1.05)) == {last}
    assert len(ways.loads) == 1
    # Twice the rows for the busiest expert: all are tried again, and the first one is the fastest.
    assert len(set(steps(ways, {first: 0.5}, 20, factor=2.0))) > 2 and len(ways.loads) == 2
    assert set(steps(ways, {first: 0.5}, 3, factor=2.0)) == {first}
    # The other entry is as it was.
    assert steps(ways, {last: 0.5}, 2)[1] == last


def test_links_are_measured_again_where_steps_drift_and_not_all_the_time() -> None:
    ways = made()
    only = way_text(ways.ways[ways.load(ROWS, 1.0).untried[0]])
    assert "measure" not in steps(ways, {only: 0.5}, 12 + WINDOW)
    assert "measure" not in steps(ways, {only: 0.59}, 2 * WINDOW)
    assert "measure" not in steps(ways, {only: 0.41}, 2 * WINDOW)
    # A fifth more than at first.
    assert steps(ways, {only: 0.61}, 2 * WINDOW)[-1] == "measure"
    ways.renew(replace(LINKS, product=Line(0.0, 4e-10)), cost_s=2.0)
    assert not ways.loads
    again = steps(ways, {only: 0.65}, 12 + WINDOW)
    assert len(set(again)) > 2 and again[-1] == only
    # Of 100 s of experts' work, measuring may take 2 s.
    drifted = steps(ways, {only: 0.9}, 99)
    assert drifted[-1] == "measure" and len(drifted) > 2 * WINDOW


def test_a_way_that_becomes_slow_gives_way_to_the_next() -> None:
    ways = made()
    first, second = (way_text(ways.ways[number]) for number in ways.load(ROWS, 1.0).untried[:2])
    steps(ways, {first: 0.5, second: 0.55}, 20)
    assert way_text(ways.ways[ways.now]) == first
    ways._usual.clear()
    assert second in steps(ways, {first: 0.58, second: 0.55}, 2 * WINDOW)
