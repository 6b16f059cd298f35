"""Dion as an optimizer: against the paper's algorithm written plainly, and cut over ranks against one process."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.optim.test_muon import Held, stepped
from tests.workers import run_workers
from thinwire.methods.sums import planned_with
from thinwire.optim import DionOptimizer
from thinwire.optim.dion import SEED

MATRICES = {"wide": (24, 50), "tall": (50, 24), "stack": (3, 10, 8)}
STEPS, LR, RANK = 6, 0.02, 5


def plain(shape: tuple[int, ...], weight: Tensor, gradients: list[Tensor], rank: int, momentum: float) -> Tensor:
    """A matrix after these gradients, by algorithm 1 of the paper in double precision, with Muon's size of a step."""
    rows, columns = shape
    rank = min(rank, *shape)
    q = torch.randn(columns, rank, generator=torch.Generator().manual_seed(SEED)).double()
    held, weight = torch.zeros(shape).double(), weight.double()
    for gradient in gradients:
        b = held + gradient.double()
        p = torch.linalg.qr(b @ q).Q
        r = b.T @ p
        held = b - (1 - momentum) * p @ r.T
        q = r / r.norm(dim=0)
        weight = weight * (1 - LR * 0.1) - 0.2 * math.sqrt(max(rows, columns)) * LR * p @ q.T
    return weight


def gradients(name: str) -> list[Tensor]:
    """What the model of `stepped` gives a parameter, step by step."""
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        drawn = {key: torch.randn(p.shape, generator=generator) for key, p in Held().named_parameters()}
        found.append(drawn[name])
    return found


@pytest.mark.parametrize("rank", [RANK, 99])
def test_equals_the_algorithm_of_the_paper(rank: int) -> None:
    start, model = Held(), Held()
    found = stepped(model, DionOptimizer(model.parameters(), LR, 0.9, rank=rank), range(STEPS))
    adamw = Held()
    vectors = torch.optim.AdamW([adamw.get_parameter("bias")], LR, betas=(0.9, 0.95), weight_decay=0.1)
    torch.testing.assert_close(found["bias"], stepped(adamw, vectors, range(STEPS))["bias"], rtol=0, atol=1e-6)
    for name, shape in MATRICES.items():
        given, weight = gradients(name), getattr(start, name)
        for number in range(shape[0]) if len(shape) == 3 else [slice(None)]:
            expected = plain(shape[-2:], weight[number], [gradient[number] for gradient in given], rank, 0.9)
            torch.testing.assert_close(found[name][number].double(), expected, rtol=0, atol=1e-6, msg=name)


def test_it_approaches_the_singular_vectors_and_leaves_noise_alone() -> None:
    """Of a gradient of rank 6 at rank 8: the other two columns are rounding."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, 6, generator=generator)).Q for n in (24, 16))
    weight = torch.zeros(24, 16)
    weight.grad = u @ torch.diag(0.5 ** torch.arange(6.0)) @ v.T
    optimizer = DionOptimizer([weight], lr=1.0, weight_decay=0.0, rank=8)
    for _ in range(40):
        before = weight.clone()
        optimizer.step()
    torch.testing.assert_close((before - weight) / (0.2 * math.sqrt(24)), u @ v.T, rtol=0, atol=1e-2)


def make(model: torch.nn.Module, codec: str = "fp32") -> DionOptimizer:
    return DionOptimizer(model.parameters(), LR, 0.9, rank=RANK, codec=codec)


def shards(rank: int, world_size: int, local_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for codec in ("fp32", "int8/32:bf16"):
        model, bucket_numel = Held(), 2048 if local_size > 1 else None
        model, optimizer = thinwire.zero(
            model, make(model, codec), thinwire.Zero(), local_size=local_size, timeout_s=30, bucket_numel=bucket_numel
        )
        stepped(model, optimizer, range(1))
        before = optimizer.meter.snapshot()
        stepped(model, optimizer, range(1, 2))
        sent = (optimizer.meter.snapshot() - before).sent_bytes
        weights = stepped(model, optimizer, range(2, STEPS))
        optimizer.check_replicas()
        inner: Any = optimizer.inner
        factors = {
            (part.name, part.own[0] // part.shape[-2:].numel() + at): factor
            for piece, part in inner.shards.parts.items()
            for at, factor in enumerate(inner.state[piece]["factor"])
        }
        kept = sum(value.numel() for p in inner.shards.parts for value in inner.state[p].values())
        grid = optimizer.comm.topology
        params = dict(Held().named_parameters())
        whole = make(Held(), codec)
        groups = {name: whole.param_groups[0] for name in params if name != "bias"}
        first = thinwire.Zero().plan(Held(), grid, 1)
        plan = planned_with(first, whole, thinwire.Zero().cuts(Held(), grid, groups), groups, grid)
        moments = 2 * sum(p.numel() for p in inner.shards.parts)
        sent_more = sum(plan.sent.values()), kept - moments, (plan.optimizer - first.optimizer) // 4
        found[codec] = weights, sent, optimizer.bytes_per_step, sent_more, factors
        optimizer.close()
    return found


@pytest.mark.parametrize(("world_size", "local_size"), [(4, 2), (2, 1)])
def test_shards_step_as_one_process(world_size: int, local_size: int) -> None:
    alone = Held()
    expected, start = stepped(alone, make(alone), range(STEPS)), {n: p.detach() for n, p in Held().named_parameters()}
    ranks = run_workers(shards, world_size, local_size, local_size=local_size)
    for found in ranks:
        for codec, (weights, sent, promised, _, factors) in found.items():
            assert sent == promised
            for name, value in expected.items():
                assert torch.equal(weights[name], ranks[0][codec][0][name])
                off = float((weights[name] - value).norm() / (value - start[name]).norm())
                assert off < (1e-5 if codec == "fp32" else 0.2), (codec, name, off)
            for other in ranks:
                shared = factors.keys() & other[codec][4].keys()
                assert all(torch.equal(factors[key], other[codec][4][key]) for key in shared), codec
    assert any(a["fp32"][4].keys() & b["fp32"][4].keys() for a, b in itertools.combinations(ranks, 2)), "none is cut"
    assert max(found["int8/32:bf16"][1] for found in ranks) < max(found["fp32"][1] for found in ranks)
    if local_size == 1:
        for codec in ranks[0]:
            planned = ranks[0][codec][3]
            assert planned[0] == max(found[codec][1] for found in ranks)
            assert planned[2] == max(found[codec][3][1] for found in ranks)
