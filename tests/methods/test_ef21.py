"""EF21 and DIANA: where plain error feedback ends in noise, differences reach the minimum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.workers import run_workers
from thinwire.errors import ConfigError
from thinwire.methods.data.ef21 import EF21
from thinwire.methods.ddp import DDPMethod
from thinwire.state.memory import Place

METHODS: dict[str, DDPMethod] = {
    "ef": thinwire.EFTopK("topk5%/64"),
    "ef21": EF21("topk5%/64", fresh=1.0),
    "ef21-momentum": EF21("topk5%/64", fresh=0.5),
    "ef21-sign": EF21("sign/64", fresh=1.0),
    "diana": EF21("int2/64", fresh=1.0, shift=0.1),
    "diana-fitting": EF21("int2/64", fresh=1.0),
    "none": thinwire.DDP(),
}
STEPS = 300


def descend(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Ranks have quadratics of their own, with minima far from each other: the distance from that of the mean."""
    curvatures = [0.5 + torch.rand(16, 16, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    minima = [torch.randn(16, 16, generator=torch.Generator().manual_seed(10 + r)) for r in range(world_size)]
    products = [curvature * minimum for curvature, minimum in zip(curvatures, minima, strict=True)]
    target = torch.stack(products).sum(0) / torch.stack(curvatures).sum(0)
    found: dict[str, dict[str, Any]] = {}
    for name, method in METHODS.items():
        model = DistributedDataParallel(nn.Linear(16, 16, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = thinwire.compress_ddp(model, method, optimizer=optimizer, local_size=1, announce=False)
        (weight,) = model.parameters()
        with torch.no_grad():
            weight.zero_()
        for _ in range(STEPS):
            off = model(torch.eye(16)).T - minima[rank]
            (0.5 * curvatures[rank] * off.square()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        kinds = handle.reduction.state.state_dict()
        found[name] = {"off": float((weight.detach() - target).norm() / target.norm()), "kept": kinds}
        handle.close()
    return found


def test_differences_reach_the_minimum_where_error_feedback_does_not() -> None:
    results = run_workers(descend, 2)
    off = {name: found["off"] for name, found in results[0].items()}
    assert off["none"] < 1e-4
    for name in ("ef21", "ef21-momentum", "ef21-sign", "diana", "diana-fitting"):
        assert off[name] < 1e-3 < 10 * off["ef"], off
        estimates = [result[name]["kept"]["estimate"]["weight"] for result in results]
        means = [result[name]["kept"]["mean"]["weight"] for result in results]
        assert torch.equal(*means), name
        torch.testing.assert_close(torch.stack(estimates).mean(0), means[0], rtol=0, atol=1e-5)


def descend_on_shards(rank: int, world_size: int) -> dict[str, Any]:
    """The same quadratics on the sharded host; off: the distance from the minimum of their mean."""
    curvatures = [0.5 + torch.rand(16, 16, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    minima = [torch.randn(16, 16, generator=torch.Generator().manual_seed(10 + r)) for r in range(world_size)]
    products = [curvature * minimum for curvature, minimum in zip(curvatures, minima, strict=True)]
    target = torch.stack(products).sum(0) / torch.stack(curvatures).sum(0)
    found: dict[str, Any] = {}
    for feedback, fresh in (("error", 1.0), ("estimates", 0.5)):
        method = thinwire.ZeroCompressed("topk5%/64", feedback=feedback, fresh=fresh, weights="fp32")
        model = nn.Linear(16, 16, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = thinwire.zero(
            model, torch.optim.SGD(model.parameters(), lr=0.1), method, local_size=1, announce=False
        )
        for _ in range(STEPS // 2):
            off = model(torch.eye(16)).T - minima[rank]
            (0.5 * curvatures[rank] * off.square()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.memory.state
        found[f"{feedback} {fresh}"] = float((model.weight.detach() - target).norm() / target.norm())
        planned = method.plan(nn.Linear(16, 16, bias=False), optimizer.comm.topology, 1).other["error feedback"]
        assert planned == optimizer.memory.planned_bytes == sum(kept.planned_bytes for _, kept in state._all())
        found["kept"] = state.state_dict()
        state.take_over(lambda kind, name: torch.full((256,), 2.0))
        found["taken"] = state.state_dict()
        optimizer.close()
    return found


def test_the_same_on_shards() -> None:
    world_size, per_node = 2, 1
    results = run_workers(descend_on_shards, world_size, local_size=per_node)
    off = results[0]
    assert off["estimates 0.5"] < 5e-3 < off["error 1.0"], off
    for state in ("kept", "taken"):
        for rank, found in enumerate(results):
            nodes = [results[other][state]["estimate"]["0"] for other in range(rank % per_node, world_size, per_node)]
            total = sum(estimate[rank // per_node] for estimate in nodes)
            torch.testing.assert_close(found[state]["mean"]["0"], total, rtol=0, atol=1e-5)
    assert float(results[0]["taken"]["mean"]["0"].max()) == 2.0 * world_size


def test_other_ranks_take_over_the_mean() -> None:
    place = Place({"weight": torch.Size([16, 16])}, thinwire.Topology(4, 1))
    state = EF21("sign", fresh=0.5).reduction(place, 0).state
    state.take_over(lambda kind, name: torch.full((256,), float(len(kind))))
    kept = state.state_dict()
    assert kept["estimate"]["weight"].shape == kept["momentum"]["weight"].shape == (16, 16)
    assert float(kept["mean"]["weight"][0, 0]) == len("mean of estimates of gradients")


def test_the_shift_suits_the_codec() -> None:
    place = Place({"weight": torch.Size([16, 16])}, thinwire.Topology(4, 1))
    # A random hundredth, a hundred times as large, has an omega of 99.
    for codec, pace in (("topk1%", 1.0), ("sign", 1.0), ("int4", 1.0), ("randomk1%", 0.01)):
        assert EF21(codec).pace == pytest.approx(pace, rel=0.1), codec
    (row,) = (row for row in EF21("int2/64").reduction(place, 0).rows() if row[0] == "what is sent")
    assert 0.3 < EF21("int2/64").pace < 0.7 and f"DIANA, shift {EF21('int2/64').pace:g} by the codec's error" in row[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "int4"}, None),
        ({"codec": "randomk1%"}, None),
        ({"codec": "int2"}, None),
        ({"codec": "int2", "shift": 1.0}, "nearest: no shift, which suits it"),
        ({"codec": "fp16"}, "a contraction or unbiased; nearest: topk1%"),
        ({"codec": "fp16", "shift": 1.0}, "int4:nearest"),
        ({"codec": "sign", "shift": 0.5}, "nearest: shift 1"),
        ({"codec": "randomk1%", "shift": 0.01}, None),
        ({"codec": "int4+zstd"}, "all have the size it promises; nearest: '"),
        ({"codec": "tokp1%"}, "did you mean"),
        ({"fresh": 0.0}, "nearest: 0.1"),
        ({"shift": 2.0}, "nearest: 1"),
    ],
)
def test_what_can_not_work_is_refused(options: dict[str, Any], message: str | None) -> None:
    if message is None:
        EF21(**options)
        return
    with pytest.raises(ConfigError, match=message):
        EF21(**options)
