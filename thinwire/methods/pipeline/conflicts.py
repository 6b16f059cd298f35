"""Paths for several micro-batches that avoid each other: A* for one, conflict-based search for all."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, count, pairwise

from thinwire.methods.pipeline.ground import Ground, problem_of

# Solutions that are kept of each phase, and how often each may go on from one.
LOAD_SOLUTIONS, CLEAR_SOLUTIONS, EXPANSIONS = 8, 8, 300
# A solution so much better than the first ends the search; what is this much slower than the best is dropped.
GAIN, SLACK = 0.12, 0.25
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Busy:
    """A node that is occupied from start_s to end_s."""

    node: int
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Route:
    """A path of nodes, the time at each, and the end of its backward."""

    path: tuple[int, ...]
    busy: tuple[Busy, ...]
    finish_s: float


@dataclass(frozen=True)
class Forbidden:
    """What one micro-batch must avoid: stages, nodes, or nodes during a time."""

    stages: frozenset[int] = frozenset()
    nodes: frozenset[int] = frozenset()
    times: tuple[Busy, ...] = ()

    def earliest_s(self, node: int, ready_s: float, seconds: float) -> float:
        """When the node is free for `seconds`."""
        for busy in sorted(self.times, key=lambda busy: busy.start_s):
            if busy.node == node and ready_s < busy.end_s and busy.start_s < ready_s + seconds:
                ready_s = busy.end_s
        return ready_s


def shortest(ground: Ground, start: int, release_s: float, length: int, forbidden: Forbidden) -> Route | None:
    """The path of `length` nodes that ends first, with forward, loss and backward; None if all are forbidden.

    A* over (node, time): the seconds so far, plus a lower bound for the backward of the visited nodes.
    """
    ids = count()
    begin_s = forbidden.earliest_s(start, release_s, ground.costs.forward_s[start])
    first = Busy(start, FORWARD, begin_s, begin_s + ground.costs.forward_s[start])
    open_paths: list[tuple[float, int, tuple[Busy, ...], Route | None]] = [(first.end_s, next(ids), (first,), None)]
    while open_paths:
        _, _, busy, route = heapq.heappop(open_paths)
        if route is not None:
            return route
        if len(busy) == length:
            route = _returned(ground, busy, forbidden)
            heapq.heappush(open_paths, (route.finish_s, next(ids), busy, route))
            continue
        path = [each.node for each in busy]
        for node in _next_nodes(ground, path, forbidden):
            seconds = ground.costs.forward_s[node]
            ready_s = busy[-1].end_s + ground.there_s(path[-1], node)
            at_s = forbidden.earliest_s(node, ready_s, seconds)
            more = (*busy, Busy(node, FORWARD, at_s, at_s + seconds))
            heapq.heappush(open_paths, (at_s + seconds + _owed_s(ground, [*path, node]), next(ids), more, None))
    return None


def _next_nodes(ground: Ground, path: Sequence[int], forbidden: Forbidden) -> Iterator[int]:
    stages = [ground.stages[node] for node in path]
    for node, stage in enumerate(ground.stages):
        is_free = stage not in forbidden.stages and node not in forbidden.nodes
        if stage and is_free and not problem_of([*stages, stage]):
            yield node


def _backward_s(ground: Ground, chunk: int) -> float:
    return ground.costs.input_s[chunk] + ground.costs.weight_s[chunk]


def _owed_s(ground: Ground, path: Sequence[int]) -> float:
    links = sum(ground.back_s(a, b) for a, b in pairwise(path))
    return links + sum(_backward_s(ground, node) for node in path)


def _returned(ground: Ground, busy: tuple[Busy, ...], forbidden: Forbidden) -> Route:
    """The whole way: back to the start for head and loss, then the backward over the same nodes."""
    path = [each.node for each in busy]
    start, head = path[0], ground.head(path[0])
    way = [*busy]

    def take(node: int, kind: str, ready_s: float, seconds: float) -> float:
        at_s = forbidden.earliest_s(node, ready_s, seconds)
        way.append(Busy(node, kind, at_s, at_s + seconds))
        return at_s + seconds

    now_s = busy[-1].end_s + ground.there_s(path[-1], start)
    now_s = take(start, FORWARD, now_s, ground.costs.forward_s[head])
    now_s = take(start, BACKWARD, now_s, _backward_s(ground, head))
    before = start
    for node in reversed(path):
        # The last gradient crosses from the start to where the path came back from.
        link_s = ground.back_s(node, before) if node != before else 0.0
        now_s = take(node, BACKWARD, now_s + link_s, _backward_s(ground, node))
        before = node
    return Route(tuple(path), tuple(way), now_s)


@dataclass(frozen=True)
class Solution:
    """A route for each micro-batch of a wave, and what each must avoid."""

    routes: tuple[Route, ...]
    forbidden: tuple[Forbidden, ...]
    releases_s: tuple[float, ...] = field(compare=False)

    @property
    def makespan_s(self) -> float:
        return max(route.finish_s for route in self.routes)

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        return tuple(route.path for route in self.routes)

    def forbid(self, ground: Ground, agent: int, more: Forbidden) -> Solution | None:
        """The solution with a new route for one micro-batch; None if there is none."""
        length, start = len(self.routes[agent].path), self.routes[agent].path[0]
        route = shortest(ground, start, self.releases_s[agent], length, more)
        if route is None:
            return None
        routes = (*self.routes[:agent], route, *self.routes[agent + 1 :])
        return replace(self, routes=routes, forbidden=(*self.forbidden[:agent], more, *self.forbidden[agent + 1 :]))


def found_paths(ground: Ground, num_paths: int, length: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield solutions of paths for `num_paths` micro-batches: first without overload, then also without collisions.

    The starts launch micro-batches in turn, each when the forward of its previous one is done.
    """
    root = _root(ground, num_paths, length)
    if root is None:
        return
    evened = list(_search(ground, [root], lambda found: _overload(ground, found, length), LOAD_SOLUTIONS))
    clear = _search(ground, evened, lambda found: _either(ground, found, length), CLEAR_SOLUTIONS)
    seen = set()
    for solution in (*evened, *clear):
        if solution.paths not in seen:
            seen.add(solution.paths)
            yield solution.paths


def _root(ground: Ground, num_paths: int, length: int) -> Solution | None:
    starts, launched = ground.starts, Counter[int]()
    routes, releases = [], []
    for number in range(num_paths):
        start = starts[number % len(starts)]
        releases.append(launched[start] * ground.costs.forward_s[start])
        launched[start] += 1
        route = shortest(ground, start, releases[-1], length, Forbidden())
        if route is None:
            return None
        routes.append(route)
    return Solution(tuple(routes), (Forbidden(),) * num_paths, tuple(releases))


# How much is wrong with a solution, and the ways on: (micro-batch, what it must not do from now on).
Conflict = tuple[int, list[tuple[int, Forbidden]]]


def _search(
    ground: Ground, begun: Sequence[Solution], conflict_of: Callable[[Solution], Conflict], most: int
) -> Iterator[Solution]:
    """Yield solutions without conflicts, searching from those with the fewest conflicts, shorter ones first."""
    ids = count()
    open_solutions: list[tuple[int, float, int, Solution, list[tuple[int, Forbidden]]]] = []
    for solution in begun:
        wrong, ways = conflict_of(solution)
        heapq.heappush(open_solutions, (wrong, solution.makespan_s, next(ids), solution, ways))
    best_s = first_s = float("inf")
    num_found, seen = 0, set()
    for _ in range(EXPANSIONS):
        if not open_solutions or num_found == most:
            return
        wrong, makespan_s, _, solution, ways = heapq.heappop(open_solutions)
        if makespan_s > best_s * (1 + SLACK):
            continue
        if not wrong:
            yield solution
            num_found += 1
            first_s = min(first_s, makespan_s) if num_found == 1 else first_s
            best_s = min(best_s, makespan_s)
            if best_s < first_s * (1 - GAIN):
                return
            continue
        for agent, forbidden in ways:
            better = solution.forbid(ground, agent, forbidden)
            if better is not None and (key := (better.paths, better.forbidden)) not in seen:
                seen.add(key)
                still, next_ways = conflict_of(better)
                heapq.heappush(open_solutions, (still, better.makespan_s, next(ids), better, next_ways))


def _overload(ground: Ground, solution: Solution, length: int) -> Conflict:
    """Stages, then nodes, that more paths visit than allowed (rule TC1).

    If there are none, but a stage has too few visits: those with more than they need.
    """
    num_paths = len(solution.routes)
    nodes = Counter(node for path in solution.paths for node in path[1:])
    stages = Counter(ground.stages[node] for node in nodes.elements())
    most = ground.capacity(num_paths, length)
    over_stages = {stage: num - most[stage] for stage, num in sorted(stages.items()) if num > most[stage]}
    limits = {node: ground.node_capacity(ground.stages[node], num_paths, length) for node in nodes}
    over_nodes = {node: num - limits[node] for node, num in sorted(nodes.items()) if num > limits[node]}
    least, too_few = ground.least(num_paths, length), 0
    if not over_stages and not over_nodes:
        too_few = sum(max(0, few - stages[stage]) for stage, few in least.items())
        over_stages = {stage: stages[stage] - few for stage, few in least.items() if too_few and stages[stage] > few}
    ways: list[tuple[int, Forbidden]] = []
    seen: set[tuple[int, ...]] = set()
    stage, node = next(iter(over_stages), None), next(iter(over_nodes), None)
    for agent, path in reversed(list(enumerate(solution.paths))):
        # Of micro-batches on one path any may give way: the last does.
        if path in seen:
            continue
        own = solution.forbidden[agent]
        if stage is not None and any(ground.stages[each] == stage for each in path):
            ways.append((agent, replace(own, stages=own.stages | {stage})))
            seen.add(path)
        elif stage is None and node is not None and node in path:
            ways.append((agent, replace(own, nodes=own.nodes | {node})))
            seen.add(path)
    return too_few or sum(over_stages.values()) + sum(over_nodes.values()), ways


def _either(ground: Ground, solution: Solution, length: int) -> Conflict:
    """Overload before collisions: who avoids a collision must not crowd another node."""
    overload, ways = _overload(ground, solution, length)
    collisions, ways_on = _collision(ground, solution)
    return overload + collisions, ways if overload else ways_on


def _collision(ground: Ground, solution: Solution) -> Conflict:
    """Two micro-batches that need a node at once (rule TC2); two backwards may.

    The one that ends earlier is moved; among the slowest quarter either may be.
    """
    found = []
    for (a, one), (b, two) in combinations(enumerate(solution.routes), 2):
        for first in one.busy:
            for second in two.busy:
                both_backward = first.kind == second.kind == BACKWARD
                overlap_s = min(first.end_s, second.end_s) - max(first.start_s, second.start_s)
                if first.node == second.node and not both_backward and overlap_s > 1e-9:
                    found.append((max(first.start_s, second.start_s), a, b, first, second))
    if not found:
        return 0, []
    _, a, b, first, second = min(found, key=lambda each: each[:3])
    by_finish = sorted(range(len(solution.routes)), key=lambda agent: -solution.routes[agent].finish_s)
    slowest = set(by_finish[: max(1, len(by_finish) // 4)])
    faster, kept = ((a, second), (b, first))
    if solution.routes[a].finish_s > solution.routes[b].finish_s:
        faster, kept = kept, faster
    yielding = [faster, kept] if {a, b} & slowest else [faster]
    ways = [
        (agent, replace(solution.forbidden[agent], times=(*solution.forbidden[agent].times, taken)))
        for agent, taken in yielding
    ]
    return len(found), ways
