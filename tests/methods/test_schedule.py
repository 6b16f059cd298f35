"""Every method's schedule has the bytes of its plan, and can be simulated to its end."""

from __future__ import annotations

import pytest

from thinwire.collectives import Topology
from thinwire.cost import Cores, Machine, Message, Network, Work, simulate
from thinwire.models import build_skeleton
from thinwire.options import build_strategy, has_islands
from thinwire.registry import STRATEGIES


class Alike(dict[str, float]):
    """The same rate for every kind of work."""

    def __contains__(self, kind: object) -> bool:
        return True

    def __missing__(self, kind: str) -> float:
        return 1e9


@pytest.mark.parametrize("grid", [Topology(4, 1), Topology(2, 2), Topology(1, 2)], ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_schedule_has_the_bytes_of_its_plan(name: str, grid: Topology) -> None:
    model, method = build_skeleton("tiny", 257, 64), build_strategy(name, {}, num_steps=1000, num_warmup_steps=100)
    planned = {key: float(num) for key, num in method.plan(model, grid, 2).sent.items() if num}
    graph = method.schedule(model, grid, 2, Work("layer 64 fp32", 1e6))
    assert graph.sent(0) == pytest.approx(planned)
    # What islands exchange is sent, and handed out, by their first ranks alone.
    of_firsts = {key for key in planned if has_islands(name) and key[0] in ("outer", "outer_commit", "broadcast")}
    assert of_firsts or not has_islands(name) or grid.num_nodes == 1
    for rank in range(1, grid.world_size):
        left_out = of_firsts if grid.local_rank(rank) else set()
        assert graph.sent(rank) == pytest.approx({key: num for key, num in planned.items() if key not in left_out})
    network = Network.even(grid.world_size, 1e6, 1e-4, local_size=grid.local_size, local_rate=1e9)
    ranks = range(grid.world_size)
    machine = Machine(("a",) * len(ranks), network, Cores(tuple(ranks), (1.0,) * len(ranks)), Alike())
    found = simulate(graph, machine)
    crossing = sum(
        task.does.num_bytes for task in graph.tasks
        if isinstance(task.does, Message) and task.rank == 0 and network.ports((0, task.does.target))
    )  # fmt: skip
    # Two forwards and backwards of 1 ms each, and what no overlap can hide.
    assert max(6e-3, crossing / 1e6) <= found.makespan_s
