"""Skipping stages: the rules of paths, what nodes take, collisions, and how much faster a step is."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations, product

import pytest

from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.methods.pipeline import Costs, Pipeline, Plan, check, simulate
from thinwire.methods.pipeline.conflicts import Busy, Forbidden, _either, _root, _search, found_paths, shortest
from thinwire.methods.pipeline.ground import Ground, problem_of
from thinwire.methods.pipeline.options import check_stages
from thinwire.methods.pipeline.skip import (
    check_visits,
    even_paths,
    full_paths,
    path_length,
    planned_paths,
    random_paths,
    skipping,
    waves,
)

# Stages, share that is skipped, micro-batches.
FEW = [(4, 0.5, 3), (4, 0.5, 4), (4, 0.25, 2), (6, 0.2, 4), (6, 0.33, 2), (8, 0.25, 3), (8, 0.5, 4), (4, 0.5, 13)]


def world(seed: int, sizes: list[int], memory: int | None = 3) -> Ground:
    """Nodes with delays of 1 to 150 ms and rates of 0.01 to 0.5 GiB/s."""
    draws, num = random.Random(seed), sum(sizes)
    delays, rates = ([[0.0] * num for _ in range(num)] for _ in range(2))
    for a, b in combinations(range(num), 2):
        delays[a][b] = delays[b][a] = math.exp(draws.uniform(math.log(0.001), math.log(0.15)))
        rates[a][b] = rates[b][a] = 2**30 * math.exp(draws.uniform(math.log(0.01), math.log(0.5)))
    stages = tuple(stage for stage, size in enumerate(sizes) for _ in range(size))
    forward = (1.76,) * num + (0.44,) * sizes[0]
    half = (1.32,) * num + (0.0,) * sizes[0]
    costs = replace(Costs.even(num + sizes[0], forward_bytes=2**24), forward_s=forward, input_s=half, weight_s=half)
    links = Network(tuple(range(num)), tuple(map(tuple, rates)), tuple(map(tuple, delays)))
    return Ground(stages, costs, links, memory)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ([0, 1, 2, 3], ""),
        ([0, 2, 1, 3], ""),
        ([0, 2, 1, 4, 3, 5], ""),
        ([0, 4, 5], ""),
        ([0, 3, 1, 2], "goes back by 2"),
        ([0, 2, 1, 4, 3, 6, 5], "swaps stages 3 times"),
        ([0, 5], "jumps over 4 stages"),
        ([0, 1, 1], "twice"),
        ([1, 2], "start at stage 0"),
    ],
)
def test_rules_of_a_path(path: list[int], problem: str) -> None:
    assert (problem in problem_of(path)) if problem else not problem_of(path)


@pytest.mark.parametrize(("num_stages", "length"), [(3, 2), (4, 3), (6, 4)])
@pytest.mark.parametrize("is_stated", [False, True])
def test_paths_keep_the_rules_and_what_nodes_take(is_stated: bool, num_stages: int, length: int) -> None:
    # An even share of all visits, or as much stated as what each of a stage's two nodes takes.
    num_paths, num_found = 8, 0
    most = math.ceil(num_paths * (length - 1) / (num_stages - 1))
    most_of_node = math.ceil(most / 2)
    most = 2 * most_of_node if is_stated else most
    ground = world(num_stages, [2] * num_stages, memory=most_of_node if is_stated else None)
    unlimited = [shortest(ground, number % 2, 0.0, length, Forbidden()) for number in range(num_paths)]
    crowded = Counter(node for route in unlimited if route is not None for node in route.path[1:])
    stages_crowded = Counter(ground.stages[node] for node in crowded.elements())
    assert max(crowded.values()) > most_of_node or max(stages_crowded.values()) > most
    for paths in found_paths(ground, num_paths, length):
        num_found += 1
        assert [path[0] for path in paths] == [0, 1] * (num_paths // 2)
        for path in paths:
            stages = [ground.stages[node] for node in path]
            assert len(stages) == length and not problem_of(stages)
        nodes = Counter(node for path in paths for node in path[1:])
        assert max(nodes.values()) <= most_of_node
        assert max(Counter(ground.stages[node] for node in nodes.elements()).values()) <= most
    assert num_found


@pytest.mark.parametrize(("num_stages", "skip", "num"), FEW)
def test_no_stage_starves_in_a_step_of_few_micro_batches(num_stages: int, skip: float, num: int) -> None:
    others, length = num_stages - 1, path_length(num_stages, skip)
    made = skipping(num_stages, num, skip)
    check(made)
    visits = Counter(chunk for path in made.paths for chunk in path[1:-1])
    # One wave is even; the paths that a longer step repeats are one more each at most.
    few = min(num, 4 * others) * (length - 1) // others
    assert len(visits) == others and few <= min(visits.values()) <= max(visits.values()) <= min(visits.values()) + 2
    assert num > 4 * others or max(visits.values()) <= few + 1


def test_even_paths_keep_the_rules_for_any_numbers() -> None:
    for num_stages, length, num, size in product(range(2, 13), range(2, 12), (1, 2, 3, 5, 8, 13), (1, 2)):
        if length > num_stages or num_stages - 1 > 4 * (length - 1):
            continue
        stages = tuple(stage for stage in range(num_stages) for _ in range(size))
        ground = Ground(stages, Costs.even(len(stages) + size), Network.even(len(stages)))
        paths = even_paths(ground, num, length)
        assert [path[0] for path in paths] == [number % size for number in range(num)]
        assert not any(problem_of([stages[node] for node in path]) for path in paths)
        assert {len(path) for path in paths} == {length}
        nodes = Counter(node for path in paths for node in path)
        visits = [sum(nodes[node] for node, at in enumerate(stages) if at == stage) for stage in range(1, num_stages)]
        even = num * (length - 1) / (num_stages - 1)
        assert set(visits) <= {math.floor(even), math.ceil(even)}
        assert all(nodes[node] <= math.ceil(visits[at - 1] / size) for node, at in enumerate(stages) if at)


def test_paths_are_even_ones_where_the_search_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.methods.pipeline.skip.found_paths", lambda *_: iter(()))
    made = skipping(6, 4, 0.33, nodes=(0, 1, 2, 2, 3, 4, 5))
    check(made)
    assert {chunk for path in made.paths for chunk in path} == set(range(8))
    # Nobody knows whether even ones keep within what nodes are stated to take.
    with pytest.raises(ConfigError, match="keep within what nodes take"):
        planned_paths(world(0, [1, 1, 1, 1], memory=3), 3, 3, 3)


def test_a_path_is_the_one_that_is_done_first() -> None:
    ground = world(1, [1, 2, 2, 2])
    found = shortest(ground, 0, 0.0, 3, Forbidden())
    assert found is not None

    def alone_s(path: tuple[int, ...]) -> float:
        return simulate(ground.plan_of([path]), ground.costs, ground.network).makespan_s

    nodes = [(0, *way) for way in permutations(range(1, 7), 2) if not problem_of([ground.stages[n] for n in (0, *way)])]
    best = min(nodes, key=alone_s)
    assert found.finish_s == pytest.approx(alone_s(best)) == pytest.approx(alone_s(found.path))
    # A node that is taken is waited for, and one that is forbidden left out.
    taken = Busy(0, "forward", 0.0, 5.0)
    later = shortest(ground, 0, 0.0, 3, Forbidden(times=(taken,)))
    assert later is not None and later.finish_s == pytest.approx(found.finish_s + 5.0)
    other = shortest(ground, 0, 0.0, 3, Forbidden(nodes=frozenset(found.path[1:])))
    assert other is not None and not set(other.path[1:]) & set(found.path[1:])
    assert shortest(ground, 0, 0.0, 3, Forbidden(stages=frozenset([1, 2, 3]))) is None


def waited_s(ground: Ground, paths: Sequence[Sequence[int]]) -> float:
    """Seconds that forwards wait for a node that is busy, in the plan that would run."""
    plan = ground.plan_of(paths)
    timeline = simulate(plan, ground.costs, ground.network)
    arrived = {what: end_s for *_, what, _, end_s in timeline.messages}
    waited = 0.0
    for action, begin_s, _ in (each for span in timeline.spans for each in span):
        needs = [arrived[need] for need in plan.routes.needs(action) if need in arrived]
        waited += begin_s - needs[0] if action.kind == "F" and needs else 0.0
    return waited


def test_paths_that_avoid_collisions_never_wait_for_a_node_in_the_plan_that_runs() -> None:
    ground = world(2, [2, 2, 2, 2], memory=2)
    # Links that messages share are no nodes.
    free = tuple((math.inf,) * len(ground.stages) for _ in ground.stages)
    ground = replace(ground, network=replace(ground.network, rates=free))
    root = _root(ground, 4, 3)
    assert root is not None
    clear = list(_search(ground, [root], lambda found: _either(ground, found, 3), 4))
    assert clear
    for solution in clear:
        # Of two that go back at once one waits, and what comes behind it may too, for a moment.
        assert waited_s(ground, solution.paths) < 0.01 * 1.76 < 1.76 < waited_s(ground, root.paths)
        for one, two in combinations(solution.routes, 2):
            for a, b in product(one.busy, two.busy):
                apart = a.end_s <= b.start_s + 1e-9 or b.end_s <= a.start_s + 1e-9
                assert a.node != b.node or apart or a.kind == b.kind == "backward"


def test_skipping_nothing_is_the_pipeline_and_skipping_a_third_a_third_less_work() -> None:
    costs = replace(
        Costs.even(5), forward_s=(1.0,) * 4 + (0.0,), input_s=(1.0,) * 4 + (0.0,), weight_s=(1.0,) * 4 + (0.0,)
    )
    whole = skipping(4, 8, 0.0, costs)
    assert whole == Pipeline(head="first").plan_of(4, 8, costs)
    # Heads wait for what the first rank is doing: more than the 33 of a head on the last rank.
    assert simulate(whole, costs).makespan_s == 38.0
    assert path_length(6, 0.33) == 4 and path_length(4, 0.33) == 3
    made = skipping(4, 12, 0.33, costs)
    check(made)
    visits = Counter(chunk for path in made.paths for chunk in path)
    # Nobody starves: each stage but the first has its even share.
    assert visits == {0: 12, 1: 8, 2: 8, 3: 8, 4: 12}
    assert all(path[0] == 0 and path[-1] == 4 and not problem_of(path[:-1]) for path in made.paths)
    assert made == skipping(4, 12, 0.33, costs)
    work = sum(end - start for span in simulate(made, costs).spans for _, start, end in span)
    assert (
        work
        == sum(end - start for span in simulate(skipping(4, 12, 0.0, costs), costs).spans for _, start, end in span)
        * 3
        / 4
    )


def most_begun(made: Plan) -> list[int]:
    """For each rank, the most micro-batches at once that it has begun and not finished."""
    found = []
    for order in made.orders:
        begun, peak = Counter[int](), 0
        left = Counter(action.micro_batch for action in order if action.kind == "B")
        for action in order:
            if action.kind == "F":
                begun[action.micro_batch] += 1
                peak = max(peak, len(begun))
            else:
                left[action.micro_batch] -= 1
                if not left[action.micro_batch]:
                    del begun[action.micro_batch]
        found.append(peak)
    return found


def test_no_more_are_in_flight_than_was_stated() -> None:
    for num in (1, 2):
        made = skipping(4, 12, 0.25, in_flight=num)
        check(made)
        assert max(most_begun(made)) == num
    # Each of the two nodes behind the starts is full of what the other must take.
    ground, paths = world(1, [2, 1, 1]), [(0, 2, 3), (1, 3, 2)]
    assert max(most_begun(ground.plan_of(paths))) == 2
    with pytest.raises(ConfigError, match=r"in_flight 1 is too few for these paths: .*; nearest that may do: 2"):
        ground.plan_of(paths, 1)


def test_paths_are_the_fastest_with_as_many_in_flight() -> None:
    ground = world(0, [1, 1, 1, 1], None)
    few, many = (planned_paths(ground, 6, 3, 12, in_flight=num) for num in (2, None))
    assert few != many and ground.makespan_s(few, 2) < 0.9 * ground.makespan_s(many, 2)


def test_planned_paths_beat_random_ones_and_these_the_whole_pipeline() -> None:
    wins = 0
    for seed in range(5):
        ground = world(seed, [2, 2, 2, 2], memory=3)
        full, drawn = full_paths(ground, 6), random_paths(ground, 6, 3, seed)
        planned = planned_paths(ground, 6, 3, 12)
        steps = [ground.makespan_s(paths) for paths in (planned, waves(drawn, 12), waves(full, 12))]
        wins += steps == sorted(steps)
    assert wins == 5


@pytest.mark.parametrize(
    ("stages", "skip", "message"),
    [
        (4, 1.0, "below 1; nearest: 0.33"), (4, -0.5, "nearest: 0"), (4, 0.8, "visits at least 2; nearest: 0.5"),
        (8, 0.75, "to the last stage visits at least 3; nearest: 0.625"),
        (4, 0.1, "leaves out no stage; nearest: 0.25, which leaves out one"), (2, 0.2, "no stage; nearest: 0"),
    ],
)  # fmt: skip
def test_shares_that_leave_no_path_are_refused(stages: int, skip: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        skipping(stages, 8, skip)


@pytest.mark.parametrize(
    ("stages", "skip", "num", "nearest"),
    [
        (4, 0.5, 2, "3 micro-batches, or skip 0.25"), (4, 0.25, 1, "2 micro-batches, or skip 0"),
        (6, 0.5, 2, "3 micro-batches, or skip 0.333"), (8, 0.5, 2, "3 micro-batches, or skip 0.375"),
    ],
)  # fmt: skip
def test_steps_too_short_for_all_stages_are_refused(stages: int, skip: float, num: int, nearest: str) -> None:
    message = rf"skip {skip:g} of {stages} stages with micro-batches {num}: .*; nearest: {nearest}$"
    with pytest.raises(ConfigError, match=message):
        check_stages(Pipeline(head="first", skip=skip), stages, stages, num)
    more, less = nearest.split(" micro-batches, or skip ")
    check_visits(stages, skip, int(more))
    check_visits(stages, float(less), num)


def test_micro_batches_take_the_starts_in_turn_and_stages_without_a_node_are_refused() -> None:
    made = skipping(4, 8, 0.25, nodes=(0, 1, 2, 3, 0, 2))
    check(made)
    # Back to the start from which each came: the heads are behind the nodes, in the order of the starts.
    assert [(path[0], path[-1]) for path in made.paths] == [(0, 6), (4, 7)] * 4
    assert {chunk for path in made.paths for chunk in path} == set(range(8))
    # Three starts do not divide the usual number of paths that are planned together.
    assert [path[0] for path in skipping(3, 12, 0.33, nodes=(0, 0, 0, 1, 2)).paths] == [0, 1, 2] * 4
    with pytest.raises(ConfigError, match="nodes of 3 stages: the pipeline has 4"):
        skipping(4, 8, 0.25, nodes=(0, 1, 2))
    with pytest.raises(ConfigError, match="each from 0 to 3 needs a node"):
        skipping(4, 8, 0.25, nodes=(0, 1, 3))
