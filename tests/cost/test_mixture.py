"""A layer of experts on streams of its own, by hand and by FSMoE's formula; links as lines."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.cost.fsmoe import fsmoe_s
from thinwire.cost import Cores, Drawing, Machine, Network, Work, mixture, simulate
from thinwire.cost.graph import CARRY
from thinwire.cost.links import Line, Links
from thinwire.cost.mixture import Portion, pass_graph, passes_s, timelines

INF = float("inf")


def streams_s(
    times: tuple[float, float, float, float], chunks: int, gradients_s: float = 0.0, inside: str = CARRY
) -> float:
    """FSMoE's schedule, simulated: between nodes all dispatches, then gradients, then what goes back.

    inside: the stream of what travels inside a node; by default a third one.
    """
    all_to_all_s, gather_s, scatter_s, expert_s = times
    drawing = Drawing(1)
    stream = (drawing.job(0, ()),)
    there = [drawing.task(0, Work("link", all_to_all_s), (), stream) for _ in range(chunks)]
    if gradients_s:
        drawing.task(0, Work("link", gradients_s), (), stream)
    for came in there:
        gathered = drawing.task(0, Work(inside, gather_s), came, stream)
        worked = drawing.task(0, Work("expert", expert_s), gathered)
        drawing.task(0, Work("link", all_to_all_s), drawing.task(0, Work(inside, scatter_s), worked, stream), stream)
    rates = {"link": 1.0, CARRY: 1.0, "expert": 1.0}
    return simulate(drawing.done(), Machine(("a",), Network.even(1), Cores((0,), (INF,)), rates)).makespan_s


def drawn(num: int, seed: int) -> Iterator[tuple[tuple[float, float, float, float], int, float]]:
    draw = random.Random(seed)
    for _ in range(num):
        all_to_all_s, inside_s, expert_s = (draw.uniform(0.1, 2) for _ in range(3))
        chunks, gradients_s = draw.choice([1, 2, 4, 8]), draw.choice([0.0, draw.uniform(0, 10)])
        yield (all_to_all_s, inside_s, inside_s, expert_s), chunks, gradients_s


def test_the_formula_of_fsmoe_is_near_its_schedule() -> None:
    errors: dict[int, list[float]] = defaultdict(list)
    for times, chunks, gradients_s in drawn(600, 0):
        seconds, case = fsmoe_s(*times, chunks, gradients_s)
        errors[case].append(seconds / streams_s(times, chunks, gradients_s) - 1)
    assert set(errors) == {1, 2, 3, 4}
    for case in (1, 2):
        assert sum(abs(error) < 1e-9 for error in errors[case]) >= 0.98 * len(errors[case])
    every = [abs(error) for of_case in errors.values() for error in of_case]
    assert max(every) < 0.22 and sum(every) / len(every) < 0.02


def test_the_degree_of_the_formula_is_near_the_best_of_separate_streams() -> None:
    draw, near, degrees = random.Random(1), 0, [1, 2, 4, 8]
    for _ in range(200):
        works = [draw.uniform(0.1, 4) for _ in range(3)]
        # Each chunk has the latencies of a whole layer.
        alphas = [draw.uniform(0, 0.2) for _ in range(3)]
        cut = {n: [alpha + work / n for alpha, work in zip(alphas, works, strict=True)] for n in degrees}
        of_chunk = {n: (each[0], each[1], each[1], each[2]) for n, each in cut.items()}
        formula = {n: fsmoe_s(*of_chunk[n], n)[0] for n in degrees}
        chosen = min(formula, key=formula.__getitem__)
        seconds = {n: streams_s(of_chunk[n], n) for n in degrees}
        assert seconds[chosen] <= 1.2 * min(seconds.values())
        near += seconds[chosen] <= 1.05 * min(seconds.values())
    assert near >= 180


def test_on_one_link_the_degree_of_the_formula_costs_up_to_a_quarter_and_the_simulated_one_nothing() -> None:
    draw, over, degrees = random.Random(2), list[float](), [1, 2, 4, 8]
    for _ in range(200):
        works, alphas = ([draw.uniform(*each) for _ in range(3)] for each in ((0.1, 4), (0, 0.2)))
        cut = {n: [alpha + work / n for alpha, work in zip(alphas, works, strict=True)] for n in degrees}
        of_chunk = {n: (each[0], each[1], each[1], each[2]) for n, each in cut.items()}
        seconds = {n: streams_s(of_chunk[n], n, inside="link") for n in degrees}
        chosen = min(degrees, key=lambda n: fsmoe_s(*of_chunk[n], n)[0])
        over.append(seconds[chosen] / min(seconds.values()) - 1)
    assert 0.1 < max(over) < 0.4 and min(over) >= 0
    assert sum(each > 0.05 for each in over) > 40


@pytest.mark.parametrize(
    ("times", "gradients_s", "expected"),
    [
        # The link between nodes is ten times slower, the experts are, the links inside are; gradients wait for nothing.
        ((10.0, 1.0, 1.0, 1.0), 3.0, (2 * 4 * 10.0 + 3.0, 1)),
        ((1.0, 0.5, 0.5, 10.0), 0.0, (2 * 1.0 + 1.0 + 40.0, 2)),
        ((1.0, 0.5, 0.5, 0.1), 0.0, (2 * 4 * 1.0 + 1.0, 3)),
        ((1.0, 10.0, 10.0, 1.0), 0.0, (2 * 1.0 + 80.0, 4)),
    ],
)
def test_cases_by_hand(
    times: tuple[float, float, float, float], gradients_s: float, expected: tuple[float, int]
) -> None:
    assert fsmoe_s(*times, 4, gradients_s) == expected


def layer(chunks: int, num_bytes: float, work_s: float) -> list[Portion]:
    """Two ranks that send each other half of their rows."""
    hop = {(0, 1): num_bytes / chunks, (1, 0): num_bytes / chunks}
    return [Portion([hop], [work_s / chunks] * 2, [hop]) for _ in range(chunks)]


def test_chunks_hide_work_and_cost_latency() -> None:
    def seconds(chunks: int, delay_s: float) -> float:
        links = Links.stated(1.0, INF, delay_s)
        return passes_s((0, 1), layer(chunks, 4.0, 8.0), [], links)

    # 4 s there, 8 s of work, 4 s back; halves: the second comes while experts work on the first.
    assert seconds(1, 0.0) == pytest.approx(16.0) and seconds(2, 0.0) == pytest.approx(12.0)
    # The second half leaves when the first is there, which has told how many rows come.
    assert seconds(1, 3.0) == pytest.approx(22.0) and seconds(2, 3.0) == pytest.approx(2 + 3 + 2 + 3 + 4 + 2 + 3)


def test_hops_follow_each_other_and_ranks_of_a_node_share_its_port() -> None:
    links = Links.stated(2.0, 4.0, 0.5, local_size=2)
    inside, across = {(0, 1): 4.0, (2, 3): 4.0}, {(1, 3): 4.0, (0, 2): 4.0, (1, 1): 9.0}
    graph = pass_graph(4, [Portion([inside, across], [0.0] * 4, [])], is_told=False)
    # 1 s inside for rank 1; rank 0 has the port alone until then.
    assert simulate(graph, links.machine((0, 0, 1, 1))).makespan_s == pytest.approx(1 + 3 + 0.5)
    assert Counter(task.rank for task in graph.tasks) == {0: 2, 1: 1, 2: 1}


def test_the_seconds_of_each_message_are_those_in_which_any_is_under_way() -> None:
    nodes, links = (0, 1), Links.stated(1.0, INF, 0.5)
    there, back = {(0, 1): 4.0, (1, 0): 4.0}, {(0, 1): 2.0, (1, 0): 2.0}
    chunks = [Portion([there], [10.0] * 2, [back], (["dispatch"], ["combine"])) for _ in range(2)]
    forward, backward = timelines(nodes, chunks, [], links)
    found = mixture.streams_s(forward, nodes)
    # The second dispatch leaves when the first is there; results of the first leave while experts work on the second.
    assert found == pytest.approx({("dispatch", "inter"): 2 * 4.5, ("combine", "inter"): 2 * 2.5})
    assert sum(found.values()) < forward.makespan_s + 1e-9 and not mixture.streams_s(backward, nodes)


def test_bundled_messages_take_as_long_as_those_of_all_pairs() -> None:
    nodes, links = (0, 0, 1, 1, 2, 2), replace(Links.stated(2.0, 4.0, 0.5, local_size=2), product=Line(0.0, 1.0))

    def hop(num_bytes: float) -> dict[tuple[int, int], float]:
        return {(a, b): num_bytes for a in range(6) for b in range(6)}

    chunks = [Portion([hop(3.0)], [4.0] * 6, [hop(3.0), hop(1.0)]) for _ in range(3)]
    every, few = (passes_s(nodes, chunks, chunks, links, most_ranks) for most_ranks in (6, 5))
    assert few == pytest.approx(every)
    # A receiver that all send to: one sender then has it all, and shares its port.
    hot = {(a, 0): 4.0 for a in range(2, 6)}
    every, few = (passes_s(nodes, [Portion([hot], [0.0] * 6, [])], [], links, most_ranks) for most_ranks in (6, 5))
    assert every == pytest.approx(16 / 2 + 0.5) and every <= few < 1.25 * every


def test_seconds_of_what_a_strategy_sends() -> None:
    lines = {("all_gather", "inter"): Line(1.0, 2.0), ("all_to_all", "inter"): Line(0.5, 1.0)}
    links = Links(lines)
    sent = {("all_gather_exact", "inter"): 3.0, ("expert rows", "inter"): 4.0, ("all_gather", "intra"): 9.0}
    assert links.seconds(sent) == 1 + 6 + 0.5 + 4
    assert links.seconds({("all_gather", "inter"): 0.0}) == 0.0
