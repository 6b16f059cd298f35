"""Every method's schedule has the bytes of its plan, and can be simulated to its end."""

from __future__ import annotations

import pytest

from tests.conformance.schedule import check_schedule
from thinwire.collectives import Topology
from thinwire.models import build_skeleton
from thinwire.options import build_strategy, has_islands
from thinwire.registry import STRATEGIES

# What islands exchange is sent, and handed out, by their first ranks alone.
OF_FIRSTS = ("outer", "outer_commit", "broadcast")


@pytest.mark.parametrize("grid", [Topology(4, 1), Topology(2, 2), Topology(1, 2)], ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_schedule_has_the_bytes_of_its_plan(name: str, grid: Topology) -> None:
    model, method = build_skeleton("tiny", 257, 64), build_strategy(name, {}, num_steps=1000, num_warmup_steps=100)
    sent = {operation for (operation, _), num in method.plan(model, grid, 2).sent.items() if num}
    assert not has_islands(name) or grid.num_nodes == 1 or sent & set(OF_FIRSTS)
    check_schedule(method, model, grid, OF_FIRSTS if has_islands(name) else ())
