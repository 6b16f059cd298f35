"""Placed models on real processes against one process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from tests.placement import models
from tests.workers import Rows, run_rows
from thinwire.cost import Cores, Machine, Network
from thinwire.placement import Placement
from thinwire.placement.plan import BACKWARD, FORWARD
from thinwire.placement.runner import copy_rows
from thinwire.placement.trace import trace

STEPS = 2


def machine(num_ranks: int, memory_bytes: float = float("inf"), rate: float = 1e9) -> Machine:
    """Ranks with cores of their own, and links with a delay of a tenth of a forward."""
    network = Network.even(num_ranks, rate, 1e-4)
    names, cores = tuple("abcd"[:num_ranks]), Cores(tuple(range(num_ranks)), (1.0,) * num_ranks)
    return Machine(names, network, cores, {}, memory_bytes=memory_bytes)


def seconds(model: nn.Module, inputs: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """A millisecond for each forward of a module, two for its backward."""
    is_module = {node.name: node.op == "call_module" for node in trace(model, inputs).nodes}
    return {name: (1e-3 * own, 2e-3 * own) for name, own in is_module.items()}


def placed(name: str, method: str, num_ranks: int, rank: int = 0, rate: float = 1e9) -> Placement:
    """Each rank states other seconds: the first one's plan counts."""
    model, inputs = models.made(name), models.batch(name, 0)
    stated = {key: (a * (1 + rank), b) for key, (a, b) in seconds(model, inputs).items()}
    return thinwire.place(model, inputs, machine(num_ranks, rate=rate), method, seconds=stated)


def _trained(rank: int, world_size: int, row: str) -> dict[str, Any]:
    name, method, *slow = row.split()
    placement = placed(name, method, world_size, rank, rate=1e3 if slow else 1e9)
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
        told["steps"].append(({key: value.detach().resolve_conj().numpy() for key, value in output.items()}, grads))
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


ROWS = ["branched m-sct", "branched m-etf slow", "transformer m-topo", "transformer m-etf", "spectral m-etf"]


def equal(found: Any, expected: Tensor) -> bool:
    return bool(torch.allclose(torch.from_numpy(found), expected, rtol=0, atol=1e-12))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_placed_models_train_as_one_process(num_ranks: int) -> None:
    rows = ROWS if num_ranks == 2 else ["branched m-topo", "transformer m-etf"]
    told = run_rows(_trained, rows, num_ranks, local_size=1)
    for row in rows:
        ranks, expected = told.of(row), models.alone(row.split()[0], STEPS)
        homes = ranks[0]["homes"]
        assert all(rank["homes"] == homes for rank in ranks), row
        assert len(set(homes)) == (1 if row.endswith("slow") else num_ranks), row
        for step, (outputs, grads) in enumerate(expected["steps"]):
            for found, own in (rank["steps"][step] for rank in ranks):
                assert all(equal(found[key], value) for key, value in outputs.items()), row
                assert all(equal(value, grads[key]) for key, value in own.items() if key != "idle"), row
            names = [key for rank in ranks for key in rank["steps"][step][1]]
            assert sorted(name for name in names if name != "idle") == sorted(grads), row
        state = {key: value for rank in ranks for key, value in rank["state"].items()}
        assert state.keys() == expected["state"].keys(), row
        assert sum(len(rank["state"]) for rank in ranks) == len(state), row
        for number, rank in enumerate(ranks):
            assert rank["sent"][0] == rank["sent"][1] and rank["calls"] == rank["promised"], row
            own = [unit for unit, home in enumerate(homes) if home == number]
            forward, backward = [(FORWARD, unit) for unit in own], [(BACKWARD, unit) for unit in reversed(own)]
            assert rank["spans"] == [*forward, *backward], row
        values = {key: torch.from_numpy(value) for key, value in state.items()}
        assert all(torch.allclose(values[key], value, atol=1e-12) for key, value in expected["state"].items()), row


def _copies(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Two copies on two ranks each, with a batch of its own for each copy."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    model, inputs = models.made("branched", torch.float32), models.batch("branched", 0, torch.float32)
    placement = thinwire.place(model, inputs, machine(2), "m-etf", seconds=seconds(model, inputs))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = placement.apply(optimizer, mesh["stage"], announce=False)
    here = mesh["stage"].mesh.tolist()
    assert copy_rows(here) == [("copy of the model", f"on ranks {here[0]}, {here[1]}", "of 4 ranks in all")]
    assert not copy_rows(range(4))
    method = {"zero": thinwire.Zero(), "sdp4bit": thinwire.SDP4Bit()}[name]
    model, sharded = thinwire.zero(model, optimizer, method, axis=own.axis(mesh), announce=False)
    norms, losses = [], []
    for step in range(STEPS):
        output = model(*models.batch("branched", 10 * step + mesh["data"].get_local_rank(), torch.float32))
        output["loss"].backward()
        sharded.note_loss(float(output["loss"]))
        norms.append(float(sharded.clip_grad_norm_(0.5)))
        sharded.step()
        sharded.zero_grad()
        losses.append(sharded.mean_loss)
        sharded.check_replicas()
    # What is not finite on one rank of one copy skips the step on all.
    x, targets = models.batch("branched", 99, torch.float32)
    model(x * (float("inf") if mesh["data"].get_local_rank() else 1.0), targets)["loss"].backward()
    sharded.step()
    state = {key: param.detach().numpy().copy() for key, param in model.named_parameters() if key != "idle"}
    skipped = sharded.skipped_steps
    sharded.close()
    own.close()
    return {"norms": norms, "losses": losses, "state": state, "skipped": skipped}


def _spare_steps(model: nn.Module, optimizer: torch.optim.Optimizer, copies: Sequence[int]) -> None:
    """Steps of which the second one alone uses all outputs, on the mean over copies."""
    for step in range(3):
        outputs = [model(models.batch("spare", 10 * step + copy, torch.float32)[0]) for copy in copies]
        losses = [each.square().mean() for one in outputs for each in one[: 2 if step == 1 else 1]]
        (torch.stack(losses).sum() / len(copies)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _unused(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Two copies on two ranks each, of which a loss does not reach all weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    model, inputs = models.made("spare", torch.float32), models.batch("spare", 0, torch.float32)[:1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    stated = {node.name: (1e-3, 1e-3) for node in trace(model, inputs, [models.Ignoring]).nodes}
    # A gradient that is missing has to cross ranks.
    groups = [["head", "spare.0"], ["fed", "spare.2"]]
    own = thinwire.place(model, inputs, machine(2), seconds=stated, leaves=[models.Ignoring], groups=groups).apply(
        optimizer, mesh["stage"], announce=False
    )
    assert [one.node for one in own.routes.crossings if one.senders and one.node.startswith("spare")]
    assert len(set(own.routes.plan.homes)) == 2
    model, sharded = thinwire.zero(model, optimizer, thinwire.Zero(), axis=own.axis(mesh), announce=False)
    _spare_steps(model, sharded, [mesh["data"].get_local_rank()])
    state = {key: param.detach().numpy().copy() for key, param in model.named_parameters() if key != "idle"}
    sharded.close()
    own.close()
    return state


def _of_copies(rank: int, world_size: int, name: str) -> dict[str, Any]:
    return (_unused if name == "unused" else _copies)(rank, world_size, name)


@functools.cache
def told_by_copies() -> Rows:
    return run_rows(_of_copies, ["zero", "sdp4bit", "unused"], 4, local_size=1)


def test_copies_leave_weights_alone_that_no_loss_reaches() -> None:
    model = models.made("spare", torch.float32)
    before = {key: param.detach().clone() for key, param in model.named_parameters()}
    _spare_steps(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), [0, 1])
    ranks = told_by_copies().of("unused")
    for found in ranks:
        for key, value in found.items():
            if key.startswith("fed"):
                assert torch.equal(torch.from_numpy(value), before[key]), key
            assert torch.allclose(torch.from_numpy(value), model.get_parameter(key), atol=1e-5), key
    assert {key for found in ranks for key in found} == before.keys()


def test_copies_average_over_the_data_axis_and_agree_on_all_ranks() -> None:
    told = told_by_copies()
    model = models.made("branched", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms, losses = [], []
    for step in range(STEPS):
        copies = [model(*models.batch("branched", 10 * step + copy, torch.float32))["loss"] for copy in range(2)]
        loss = (copies[0] + copies[1]) / 2
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(model.named_parameters())
    for name, close in (("zero", 1e-5), ("sdp4bit", 0.05)):
        ranks = told.of(name)
        assert all(rank["skipped"] == 1 and rank["norms"] == ranks[0]["norms"] for rank in ranks)
        assert ranks[0]["norms"] == pytest.approx(norms, rel=close)
        assert ranks[0]["losses"] == pytest.approx(losses, rel=close)
        for rank in ranks:
            found = {key: torch.from_numpy(value) for key, value in rank["state"].items()}
            assert all(torch.allclose(found[key], weights[key], atol=close) for key in found)
        assert {key for rank in ranks for key in rank["state"]} == weights.keys()
