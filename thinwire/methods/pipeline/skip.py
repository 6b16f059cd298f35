"""SkipPipe: each micro-batch visits some of the stages, on a path that avoids slow links and other micro-batches.

Source: "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous Networks" (2025),
sections 3 and 4.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import islice

from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.methods.pipeline.conflicts import found_paths
from thinwire.methods.pipeline.costs import Costs
from thinwire.methods.pipeline.ground import JUMP, Ground, problem_of
from thinwire.methods.pipeline.plan import Plan

# Paths of one start that are planned together, for each other stage; the micro-batches of a step take them in turn.
WAVE = 4
# Solutions of the search that are replayed.
REPLAYED = 16


def path_length(num_stages: int, skip: float) -> int:
    """Number of stages that a path visits, the first included.

    Raises ConfigError for a share with which no path reaches the last stage, and for one above 0 that leaves out less
    than half a stage.
    """
    if not 0 <= skip < 1:
        raise ConfigError(f"skip {skip:g}: must be at least 0 and below 1; nearest: {0 if skip < 0 else 0.33}")
    length = round(num_stages * (1 - skip))
    fewest = 1 + math.ceil((num_stages - 1) / JUMP)
    if length < fewest:
        most = 1 - fewest / num_stages
        why = f"a path to the last stage visits at least {fewest}"
        raise ConfigError(f"skip {skip:g} of {num_stages} stages: {why}; nearest: {most:.3g}")
    if skip and length >= num_stages:
        near = f"{1 / num_stages:.3g}, which leaves out one" if num_stages > 2 else "0"
        raise ConfigError(f"skip {skip:g} of {num_stages} stages: leaves out no stage; nearest: {near}")
    return length


def check_visits(num_stages: int, skip: float, num_micro_batches: int) -> None:
    """Raise ConfigError for fewer micro-batches than reach every stage, since one of them would never be trained."""
    visited, others = path_length(num_stages, skip) - 1, num_stages - 1
    if visited * num_micro_batches >= others:
        return
    # The largest share with which so many reach all.
    near = 1 - (1 + math.ceil(others / num_micro_batches)) / num_stages
    raise ConfigError(
        f"skip {skip:g} of {num_stages} stages with micro-batches {num_micro_batches}: each visits {visited} of the "
        f"{others} stages behind the first, so some would never be trained; nearest: {math.ceil(others / visited)} "
        f"micro-batches, or skip {near:.3g}"
    )


def waves(paths: Sequence[Sequence[int]], num_micro_batches: int) -> list[tuple[int, ...]]:
    """The path of each micro-batch: all paths in turn."""
    return [tuple(paths[number % len(paths)]) for number in range(num_micro_batches)]


def full_paths(ground: Ground, num_paths: int) -> list[tuple[int, ...]]:
    """Paths through all stages in order, over the nodes of each in turn: a pipeline without skipping."""
    nodes = [[node for node, at in enumerate(ground.stages) if at == stage] for stage in range(ground.num_stages)]
    return [tuple(each[number % len(each)] for each in nodes) for number in range(num_paths)]


def even_paths(ground: Ground, num_paths: int, length: int) -> list[tuple[int, ...]]:
    """Paths that visit all stages but the first equally often, or one time more, and the nodes of each in turn.

    Path i of n visits stages 1 + floor((j N + floor(i N / n)) / k) for j from 0 to k - 1, of N = stages - 1, with
    k = length - 1. So a stage has the paths whose floor(i N / n) lie in k following numbers, modulo N. No path jumps
    over more than ceil(N / k) - 1 stages.
    """
    nodes = [[node for node, at in enumerate(ground.stages) if at == stage] for stage in range(ground.num_stages)]
    others, visited, found, taken = ground.num_stages - 1, length - 1, [], [0] * ground.num_stages
    for number in range(num_paths):
        shift = number * others // num_paths
        stages = [0, *(1 + (hop * others + shift) // visited for hop in range(visited))]
        found.append(tuple(nodes[stage][taken[stage] % len(nodes[stage])] for stage in stages))
        for stage in stages:
            taken[stage] += 1
    return found


def random_paths(ground: Ground, num_paths: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Full paths from which random stages are removed: the baseline for planned paths."""
    draws = random.Random(seed)
    found = []
    for path in full_paths(ground, num_paths):
        kept = sorted(draws.sample(range(1, len(path)), length - 1))
        while problem_of([0, *kept]):
            kept = sorted(draws.sample(range(1, len(path)), length - 1))
        found.append((path[0], *(path[stage] for stage in kept)))
    return found


def spread(paths: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same paths of each start, with equal ones as far apart as possible."""
    numbered = [(paths[:number].count(path), path) for number, path in enumerate(paths)]
    by_start = {
        start: sorted(each for each in numbered if each[1][0] == start) for start in {path[0] for path in paths}
    }
    return [by_start[path[0]].pop(0)[1] for path in paths]


def planned_paths(
    ground: Ground, num_paths: int, length: int, num_micro_batches: int, in_flight: int | None = None
) -> list[tuple[int, ...]]:
    """The paths of a step's micro-batches: among those that the search finds, the fastest in `simulate`.

    num_paths: number of paths planned together, with the starts in turn; a step repeats them. in_flight: see
    `Ground.plan_of`.
    """
    replayed = max(2 * num_paths, min(num_micro_batches, 4 * num_paths))
    found: list[Sequence[tuple[int, ...]]] = list(islice(found_paths(ground, num_paths, length), REPLAYED))
    if not found and ground.memory is None:
        # The search gave up.
        found = [even_paths(ground, num_paths, length)]
    if not found:
        raise ConfigError(
            f"no {num_paths} paths of {length} of {ground.num_stages} stages keep within what nodes take: more memory, "
            "or less to skip"
        )
    found += [spread(paths) for paths in found]
    best = min(found, key=lambda paths: ground.makespan_s(waves(paths, replayed), in_flight))
    return waves(best, num_micro_batches)


def skipping(
    num_stages: int, num_micro_batches: int, skip: float, costs: Costs | None = None, network: Network | None = None,
    in_flight: int | None = None, nodes: Sequence[int] | None = None,
) -> Plan:  # fmt: skip
    """The plan of a pipeline in which each micro-batch skips a share of the stages.

    Chunk i is the layers of rank i's stage. Behind them come the heads of the starts, the ranks of stage 0, in order;
    a micro-batch returns to the start from which it came, and micro-batches take the starts in turn. Paths and orders
    are fitted to `costs`, of these chunks, and `network`; the same numbers give the same plan. skip=0: all stages in
    order. Gradients of a stage are the sum over its ranks.

    nodes: the stage of each rank; None: rank s has stage s.

    Raises ConfigError for a share or a number of stages that leaves no path, for a stage that no rank has, and for so
    few micro-batches that they can't visit all stages.
    """
    length, stages = path_length(num_stages, skip), tuple(range(num_stages) if nodes is None else nodes)
    if max(stages) != num_stages - 1:
        raise ConfigError(f"nodes of {max(stages) + 1} stages: the pipeline has {num_stages}, and each needs a node")
    check_visits(num_stages, skip, num_micro_batches)
    starts = stages.count(0)
    given = costs or Costs.even(len(stages) + starts)
    ground = Ground(stages, given, network or Network.even(len(stages)))
    if length == num_stages:
        return ground.plan_of(full_paths(ground, num_micro_batches), in_flight)
    # As many of each start.
    num_paths = min(num_micro_batches, -(-WAVE * (num_stages - 1) // starts) * starts)
    paths = planned_paths(ground, num_paths, length, num_micro_batches, in_flight)
    return ground.plan_of(paths, in_flight)
