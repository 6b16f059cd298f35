"""List schedulers: schedules that can run, bounds, brute force, and the small graphs with known answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.placement.graphs import best_s, check, devices, layered, lower_bound_s, out_tree, peaks
from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.placement.board import DeviceSchedule, NoRoomError, replay
from thinwire.placement.etf import m_etf
from thinwire.placement.graph import Devices, Op, OpGraph
from thinwire.placement.place import on_ranks
from thinwire.placement.prepare import co_adjacent, fused, least_memory, scheduled
from thinwire.placement.sct import favourites, m_sct, relaxed
from thinwire.placement.topo import m_topo

METHODS = [m_topo, m_etf, m_sct]
Method = Callable[[OpGraph, Devices], DeviceSchedule]


def unit_ops(num: int, permanent: float = 0.0) -> list[Op]:
    return [Op(f"op{number}", 1.0, permanent) for number in range(num)]


def chain(num: int, permanent: float = 0.0) -> OpGraph:
    return OpGraph.of(unit_ops(num, permanent), itertools.pairwise(range(num)), 1.0, keeps=False)


def fork_join() -> OpGraph:
    """Two branches of five, between a first and a last operation."""
    edges = [(0, 1), (0, 6), *itertools.pairwise(range(1, 6)), *itertools.pairwise(range(6, 11)), (5, 11), (10, 11)]
    return OpGraph.of(unit_ops(12), edges, 1.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keeps", [True, False])
def test_schedules_can_run_and_no_memory_overflows(method: Method, keeps: bool) -> None:
    num_placed = num_refused = 0
    for seed in range(3):
        rng = random.Random(seed)
        graph = layered(seed, rng.randint(14, 24), rng.randint(8, 16), keeps=keeps, num_groups=3)
        assert 50 <= len(graph.ops) <= 300
        num = rng.randint(2, 8)
        for room in (1.05, 1.6):
            own = devices(num, 1 / 8, room * graph.total_bytes / num + 10)
            try:
                schedule = method(graph, own)
            except NoRoomError:
                num_refused += 1
                continue
            num_placed += 1
            check(schedule)
            assert peaks(schedule) == pytest.approx(schedule.peak_bytes())
            assert schedule.makespan_s >= lower_bound_s(graph, own)
            assert sorted(schedule.order) == list(range(len(graph.ops)))
        with pytest.raises(ConfigError):
            method(graph, devices(num, 1 / 8, 0.9 * graph.total_bytes / num))
    assert num_placed >= 3, (num_placed, num_refused)


def test_every_schedule_needs_what_brute_force_needs_and_few_need_much_more() -> None:
    rng, ratios = random.Random(3), []
    for seed in range(6):
        edges = [(i, j) for i, j in itertools.combinations(range(6), 2) if rng.random() < 0.4]
        graph = OpGraph.of([Op(str(n), rng.randint(2, 6) / 4) for n in range(6)], edges, 1.0)
        own = devices(2, (0.0, 0.25)[seed % 2])
        best = best_s(graph, own)
        for method in METHODS:
            made = method(graph, own).makespan_s
            assert made >= best - 1e-12
            if method is not m_topo:
                assert made <= (2 + 0.25 / 0.5 - 1 / 2) * best
                ratios.append(made / best)
    assert sum(ratios) / len(ratios) < 1.1


def test_without_messages_earliest_first_keeps_its_bound() -> None:
    for seed in range(10):
        graph, own = layered(seed, 8, 8), devices(3)
        assert m_etf(graph, own).makespan_s <= (2 - 1 / 3) * lower_bound_s(graph, own)


@pytest.mark.parametrize("method", [m_etf, m_sct])
def test_a_chain_stays_on_one_device_or_is_cut_once(method: Method) -> None:
    graph = chain(10, permanent=10)
    for make in (lambda own: method(graph, own), lambda own: scheduled(graph, own, method)[1]):
        whole = make(devices(2, 2.0))
        assert len(set(whole.homes)) == 1 and not whole.transfers and whole.makespan_s == pytest.approx(10)
        # Five operations, the two values that one of them takes and gives, and no sixth.
        cut = make(devices(2, 2.0, 5 * 10 + 2))
        assert len(cut.transfers) == 1 and cut.makespan_s == pytest.approx(12)
        check(cut)


@pytest.mark.parametrize("method", [m_etf, m_sct])
def test_two_branches_run_on_two_devices(method: Method) -> None:
    # The first message delays one branch, the second one the other: by one message in all.
    made = method(fork_join(), devices(2, 0.1))
    assert made.makespan_s == pytest.approx(1 + 5 + 1 + 0.1) and len(made.transfers) == 2
    assert method(fork_join(), devices(1)).makespan_s == pytest.approx(12)


def test_favourite_children_of_trees() -> None:
    for seed in range(4):
        graph, own = out_tree(seed, 30), devices(30, 7 / 8)
        x, w = relaxed(graph, own)
        assert all(-1e-9 <= value <= 1 + 1e-9 for value in x.values())
        found = favourites(graph, own)
        assert len(set(found.values())) == len(found) and found.items() <= graph.edges.keys()
        made = m_sct(graph, own)
        check(made)
        assert w <= made.makespan_s + 1e-9
        # rho is at most 7/8: the bound for unlimited devices holds against the relaxation.
        assert made.makespan_s <= (2 + 2 * 7 / 8) / (2 + 7 / 8) * w + 1e-9


def test_a_device_waits_for_the_favourite_child_and_runs_urgent_work_meanwhile() -> None:
    # The first has a child that waits for another parent; work that can run anywhere comes between.
    ops = [Op("a", 1.0), Op("b", 1.5), Op("child", 4.0), Op("other", 1.0), Op("urgent", 0.25)]
    edges = [(0, 2), (1, 2), (0, 3)]
    graph = OpGraph.of(ops, edges, {0: 1.0, 1: 0.0})
    own = devices(2, 0.9)
    made = m_sct(graph, own)
    check(made)
    # Without waiting, the other child would delay the favourite one, or a message would.
    assert favourites(graph, own) == {0: 2} and m_etf(graph, own).makespan_s == pytest.approx(5.9)
    assert made.makespan_s == pytest.approx(5.5) and made.spans[2] == (1.5, 5.5) and made.spans[4] == (1.0, 1.25)
    # The favourite is the longer child; with the first one there, and on any other way, all takes longer.
    graph, own = OpGraph.of([Op(str(s), s) for s in (1.0, 1.5, 3.5, 3.0)], [(0, 1), (0, 2)], 1.0), devices(2, 1.0)
    assert favourites(graph, own) == {0: 2} and m_etf(graph, own).makespan_s == pytest.approx(6.0)
    assert m_sct(graph, own).makespan_s == pytest.approx(4.5) == best_s(graph, own)


def test_schedulers_that_know_seconds_beat_those_that_do_not() -> None:
    total = {"m-topo": 0.0, "m-etf": 0.0, "m-sct": 0.0, "random": 0.0}
    for seed in range(15):
        graph, own = layered(seed, 8, 8), devices(4, 1 / 8)
        homes = [random.Random(seed).randrange(4) for _ in graph.ops]
        total["random"] += replay(graph, own, homes).makespan_s
        for name, method in zip(("m-topo", "m-etf", "m-sct"), METHODS, strict=True):
            total[name] += method(graph, own).makespan_s
    # m-TOPO may be worse than chance.
    assert total["m-etf"] < total["m-topo"] and total["m-etf"] < total["random"]
    assert total["m-sct"] < 1.03 * total["m-etf"]


def test_a_value_is_sent_once_and_messages_of_a_link_queue() -> None:
    graph = OpGraph.of(unit_ops(6), [(0, 2), (0, 3), (1, 3), (1, 4), (0, 5)], 1.0)
    homes = (0, 0, 1, 1, 1, 0)
    queued = replay(graph, devices(2, 3.0), homes)
    check(queued)
    assert [(each.value, each.begin_s, each.arrive_s) for each in queued.transfers] == [(0, 1.0, 4.0), (1, 4.0, 7.0)]
    at_once = replay(graph, devices(2, 3.0, queues=False), homes)
    assert [(each.value, each.begin_s, each.arrive_s) for each in at_once.transfers] == [(0, 1.0, 4.0), (1, 2.0, 5.0)]
    check(at_once)


def test_a_group_reserves_its_memory_with_its_first_operation() -> None:
    # Without the reservation the second operation would fill the device on which the third must run.
    graph = OpGraph.of([Op("a", 1.0, 4), Op("b", 1.0, 4), Op("c", 1.0, 4)], [(0, 1), (1, 2)], 0.0, [(0, 2)])
    for method in METHODS:
        made = method(graph, devices(2, 0.1, 8))
        check(made)
        assert made.homes == (0, 1, 0)
    with pytest.raises(NoRoomError):
        m_etf(graph, devices(2, 0.1, 7))


def test_memory_is_freed_over_time_where_no_backward_follows() -> None:
    graph = chain(8)
    assert m_etf(graph, devices(1, memory_bytes=2)).peak_bytes() == [2.0]
    with pytest.raises(NoRoomError, match="'op2' fits on no device"):
        m_etf(replace(graph, keeps=True), devices(1, memory_bytes=2))


def test_operations_join_their_only_consumer_where_messages_take_longer() -> None:
    graph = fork_join()
    assert len(co_adjacent(graph, devices(2, 0.5)).groups) == 0
    slow = co_adjacent(graph, devices(2, 1.5))
    # The first has two consumers.
    assert [sorted(group) for group in slow.groups] == [list(range(1, 12))]
    # That would run both branches on one device; the graph itself is shorter, and is taken.
    way, made = scheduled(graph, devices(2, 1.5), m_etf)
    assert made.makespan_s == pytest.approx(1 + 5 + 1 + 1.5) and len(way.units) == 12
    way, made = scheduled(graph, devices(2, 6.0), m_etf)
    assert made.makespan_s == pytest.approx(12) and len(way.units) == 2


def test_fusing_makes_no_cycle() -> None:
    # 0 -> 1 -> 2 and 0 -> 2: joining 0 and 2 would leave 1 between them.
    graph = OpGraph.of(unit_ops(3, 1.0), [(0, 1), (1, 2), (0, 2)], 1.0, [(0, 2)])
    way = fused(graph, [(0, 2)])
    assert way.units == ((0,), (1,), (2,)) and way.graph.groups == (frozenset({0, 2}),)
    whole = fused(graph, [(0, 1), (1, 2)])
    assert whole.units == ((0, 1, 2),) and whole.graph.ops[0] == Op("op0..op2", 3.0, 5.0) and not whole.graph.values
    for seed in range(5):
        graph = layered(seed, 8, 6)
        pairs = random.Random(seed).sample(sorted(graph.edges), len(graph.edges) // 2)
        way = fused(graph, pairs)
        assert sorted(op for unit in way.units for op in unit) == list(range(len(graph.ops)))
        assert sum(op.seconds for op in way.graph.ops) == pytest.approx(sum(op.seconds for op in graph.ops))
        check(m_etf(way.graph, devices(3, 1 / 4)))


def test_devices_take_the_ranks_between_which_links_are_fast() -> None:
    rates = [[10.0] * 3 for _ in range(3)]
    for a, b in ((0, 1), (1, 0)):
        rates[a][b] = 0.1
    slow = Devices(Network((0, 1, 2), tuple(map(tuple, rates)), ((0.0,) * 3,) * 3), 20.0)
    made = replay(chain(4, permanent=4), slow, (0, 0, 1, 1))
    moved = on_ranks(made)
    best = min(
        replay(made.graph, slow, [p[home] for home in made.homes]).makespan_s for p in itertools.permutations(range(3))
    )
    assert moved.makespan_s == pytest.approx(best) and best < made.makespan_s
    # Faster ranks take more work.
    faster = replace(slow, speeds=(1.0, 1.0, 4.0), network=Network.even(3, 1e9))
    assert set(on_ranks(replay(chain(4), faster, (0,) * 4)).homes) == {2}
    assert set(m_etf(chain(4), faster).homes) <= {0, 1, 2}


def test_the_least_memory_is_enough_and_close_to_what_all_need() -> None:
    graph = layered(1, 10, 6)
    for method in (m_etf, m_topo):
        least = least_memory(graph, devices(3, 1 / 8, graph.total_bytes / 4), method)
        check(scheduled(graph, devices(3, 1 / 8, least), method)[1])
        assert graph.total_bytes / 3 <= least <= 1.5 * graph.total_bytes / 3
        with pytest.raises(NoRoomError):
            scheduled(graph, devices(3, 1 / 8, graph.total_bytes / 3), method)


def test_graphs_that_are_none() -> None:
    with pytest.raises(ConfigError, match="'op1' goes to an operation before it"):
        OpGraph.of(unit_ops(2), [(1, 0)])
    with pytest.raises(ConfigError, match="'op1' is in two groups"):
        OpGraph.of(unit_ops(3), [], 0.0, [(0, 1), (1, 2)])
