"""Holds the schedule of a method to its plan."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from torch import nn

from thinwire.collectives import Topology
from thinwire.cost import Cores, Machine, Message, Network, Work, simulate
from thinwire.methods.interface import Method


class Alike(dict[str, float]):
    """The same rate for every kind of work."""

    def __contains__(self, kind: object) -> bool:
        return True

    def __missing__(self, kind: str) -> float:
        return 1e9


def check_schedule(method: Method, model: nn.Module, grid: Topology, of_firsts: Collection[str] = ()) -> None:
    """A step of two micro-batches has the bytes of the plan on every rank, and can be simulated to its end.

    of_firsts: names of messages that only the first ranks of nodes send.
    """
    planned = {key: float(num) for key, num in method.plan(model, grid, 2).sent.items() if num}
    graph = method.schedule(model, grid, 2, Work("layer 64 fp32", 1e6))
    assert graph.sent(0) == pytest.approx(planned)
    for rank in range(1, grid.world_size):
        left_out = of_firsts if grid.local_rank(rank) else ()
        own = {key: num for key, num in planned.items() if key[0] not in left_out}
        assert graph.sent(rank) == pytest.approx(own)
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
