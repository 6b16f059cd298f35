"""Placed models on real processes against one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from tests.placement import models
from tests.workers import run_rows
from thinwire.cost import Cores, Machine, Network
from thinwire.errors import ConfigError
from thinwire.placement import Placement
from thinwire.placement.plan import BACKWARD, FORWARD
from thinwire.placement.trace import trace

STEPS = 2


def machine(num_ranks: int, memory_bytes: float = float("inf")) -> Machine:
    """Ranks with cores of their own and links on which a message takes a tenth of an operation."""
    network = Network.even(num_ranks, 1e9, 1e-4)
    return Machine(
        tuple("abcd"[:num_ranks]), network, Cores(tuple(range(num_ranks)), (1.0,) * num_ranks), {},
        memory_bytes=memory_bytes,
    )  # fmt: skip


def seconds(name: str) -> Mapping[str, tuple[float, float]]:
    """A millisecond for each forward, two for each backward; what only looks at a tensor is free."""
    traced = trace(models.made(name), models.batch(name, 0))
    return {
        node.name: (1e-3, 2e-3) if node.op == "call_module" else (0.0, 0.0) for node in traced.nodes
    }


def placed(name: str, method: str, num_ranks: int, rank: int = 0) -> Placement:
    # Each rank has stated other seconds: the first one's plan counts.
    stated = {key: (a * (1 + rank), b) for key, (a, b) in seconds(name).items()}
    return thinwire.place(models.made(name), models.batch(name, 0), machine(num_ranks), method, seconds=stated)


def _trained(rank: int, world_size: int, row: str) -> dict[str, Any]:
    name, method = row.split()
    placement = placed(name, method, world_size, rank)
    model = placement.traced.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = placement.apply(optimizer, checked=method == "m-etf", announce=False)
    told: dict[str, Any] = {"steps": [], "homes": own.routes.plan.homes, "spans": []}
    for step in range(STEPS):
        with torch.no_grad():
            # Another forward, of which no backward follows.
            model.eval()
            model(*models.batch(name, 100))
            model.train()
        before = own.meter.snapshot()
        output = model(*models.batch(name, step))
        output["loss"].backward()
        after = own.meter.snapshot()
        grads = {key: param.grad.numpy().copy() for key, param in model.named_parameters() if param.grad is not None}
        told["steps"].append(({key: value.detach().numpy() for key, value in output.items()}, grads))
        told["spans"] = [(direction, unit) for direction, unit, *_ in own.spans]
        told["sent"] = after.sent_bytes - before.sent_bytes, own.routes.sent_bytes(rank)
        told["calls"] = {
            direction: sum(r.calls for (op, _), r in after.operations.items() if op.endswith(direction))
            - sum(r.calls for (op, _), r in before.operations.items() if op.endswith(direction))
            for direction in (FORWARD, BACKWARD)
        }
        optimizer.step()
        optimizer.zero_grad()
    own.close()
    told["state"] = {key: value.numpy().copy() for key, value in model.state_dict().items() if key != "idle"}
    routes = own.routes
    told["promised"] = {
        FORWARD: sum(len(one.targets) for one in routes.crossings if one.home == rank) + len(routes.arrivals(rank)),
        BACKWARD: sum(rank in one.senders for one in routes.crossings) + len(routes.returns(rank)),
    }
    return told


ROWS = ["branched m-sct", "branched m-etf", "transformer m-topo", "transformer m-etf"]


def equal(found: Any, expected: Tensor) -> bool:
    return bool(torch.allclose(torch.from_numpy(found), expected, rtol=0, atol=1e-12))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_placed_models_train_as_one_process(num_ranks: int) -> None:
    rows = ROWS if num_ranks == 2 else ROWS[1:3]
    told = run_rows(_trained, rows, num_ranks, local_size=1)
    for row in rows:
        ranks, expected = told.of(row), models.alone(row.split()[0], STEPS)
        assert len({rank["homes"] for rank in ranks}) == 1 and len(set(ranks[0]["homes"])) == num_ranks, row
        for step, (outputs, grads) in enumerate(expected["steps"]):
            for rank in ranks:
                assert all(equal(rank["steps"][step][0][key], value) for key, value in outputs.items()), row
            found = [key for rank in ranks for key in rank["steps"][step][1]]
            assert sorted(set(found) - {"idle"}) == sorted(grads) and len(set(found)) == len(found), row
            for rank in ranks:
                assert all(equal(g, grads[key]) for key, g in rank["steps"][step][1].items() if key != "idle"), row
        state = {key: value for rank in ranks for key, value in rank["state"].items()}
        assert state.keys() == expected["state"].keys(), row
        assert sum(len(rank["state"]) for rank in ranks) == len(state), row


def test_nothing() -> None:
    assert ConfigError and init_device_mesh
