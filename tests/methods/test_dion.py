"""Dion over ranks against Dion in one process on the mean gradient, and at full rank against the singular vectors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.methods.test_compressed import Matrices, gradients
from tests.workers import run_workers
from thinwire.errors import ConfigError
from thinwire.methods.data.demo import DeMo
from thinwire.methods.data.dion import Dion
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.reduction import seed_of
from thinwire.registry import check_on_mesh

ROWS, COLUMNS, STEPS, SEED = 24, 16, 6, 3
EXPERTS = 3, 12, 10
METHODS = {"low": Dion(rank=4), "full": Dion(rank=99, momentum=0.9), "int8": Dion(rank=4, codec="int8/64:nearest")}


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(100 * rank + step))


def one_process(method: Dion, q: Tensor, given: list[Tensor]) -> list[Tensor]:
    """The updates by the algorithm for one process, from the first Q and mean gradients, in double precision."""
    q, momentum, updates = q.double(), torch.zeros_like(given[0]), []
    for gradient in given:
        b = momentum + gradient
        p = torch.linalg.qr(b @ q).Q
        r = b.T @ p
        momentum = b - (1 - method.momentum) * p @ r.T
        q = r / r.norm(dim=0)
        updates.append(math.sqrt(b.shape[0] / b.shape[1]) * p @ q.T)
    return updates


def first_q(name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed_of(SEED, 0, name) >> 1))


def reduced(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, method in METHODS.items():
        model = DistributedDataParallel(nn.Linear(COLUMNS, ROWS))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        handle = thinwire.compress_ddp(model, method, optimizer=optimizer, local_size=1, seed=SEED, announce=False)
        weight, bias = model.module.weight, model.module.bias
        outs = []
        for step in range(STEPS):
            # With an identity in front the weight has this gradient, and the bias the sums of its rows.
            (model(torch.eye(COLUMNS)) * gradient(rank, step).T).sum().backward()
            outs.append(weight.grad.clone())
            assert set(bias.grad.unique().tolist()) <= {-1.0, 1.0}
            optimizer.step()
            optimizer.zero_grad()
        found[name] = outs, handle.reduction.state.state_dict()["momentum"]["weight"]
        handle.close()
    model = DistributedDataParallel(Matrices(EXPERTS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = thinwire.compress_ddp(model, METHODS["low"], optimizer=optimizer, local_size=1, seed=SEED, announce=False)
    found["experts"] = []
    for step in range(STEPS):
        model(gradients([EXPERTS], rank, step)).backward()
        found["experts"].append(model.module.held[0].grad.clone())
        optimizer.zero_grad()
    found["sent"] = handle.bytes_per_step
    handle.close()
    return found


def test_ranks_together_are_one_process() -> None:
    results = run_workers(reduced, 2)
    for name, method in METHODS.items():
        means = [(gradient(0, step).double() + gradient(1, step).double()) / 2 for step in range(STEPS)]
        expected = one_process(method, first_q("weight", COLUMNS, min(method.rank, COLUMNS)), means)
        for outs, _ in (result[name] for result in results):
            for out, update in zip(outs, expected, strict=True):
                off = float((out - update).norm() / update.norm())
                # Factors of 8 bits turn the smaller directions.
                assert off < (0.3 if name == "int8" else 1e-5), (name, off)
        momenta = [result[name][1] for result in results]
        assert float((momenta[0] - momenta[1]).abs().max()) > 0.1, "every rank's momentum is its own"
    # A stack of experts is its matrices, each at the whole rank.
    qs, (number, rows, columns) = first_q("held.0", EXPERTS[0], EXPERTS[2], 4), EXPERTS
    both = [[gradients([EXPERTS], rank, step)[0].double() for rank in range(2)] for step in range(STEPS)]
    for expert in range(number):
        expected = one_process(METHODS["low"], qs[expert], [(one[expert] + other[expert]) / 2 for one, other in both])
        for out, update in zip(results[1]["experts"], expected, strict=True):
            assert float((out[expert] - update).norm() / update.norm()) < 1e-5, expert
    assert results[0]["sent"] == pytest.approx(4 * 4 * number * (rows + columns), rel=0.02)


def alone(rank: int, world_size: int) -> tuple[list[Tensor], Tensor]:
    """The updates after many steps with one gradient of six well separated singular values, and what they should be.

    At the gradient's rank, and at a higher one, of which two columns are rounding.
    """
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, COLUMNS, generator=generator)).Q for n in (ROWS, COLUMNS))
    given = u[:, :6] @ torch.diag(0.5 ** torch.arange(6.0)) @ v[:, :6].T
    outs = []
    for dion in (Dion(rank=6), Dion(rank=8)):
        model = DistributedDataParallel(nn.Linear(COLUMNS, ROWS, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        handle = thinwire.compress_ddp(model, dion, optimizer=optimizer, announce=False)
        for _ in range(40):
            optimizer.zero_grad()
            (model(torch.eye(COLUMNS)) * given.T).sum().backward()
        outs.append(model.module.weight.grad.clone())
        handle.close()
    return outs, math.sqrt(ROWS / COLUMNS) * u[:, :6] @ v[:, :6].T


def test_at_the_rank_of_the_gradient_the_update_is_orthonormal() -> None:
    (((out, wider), orthonormal),) = run_workers(alone, 1)
    torch.testing.assert_close(out, orthonormal, rtol=0, atol=1e-5)
    assert float((wider - orthonormal).norm() / orthonormal.norm()) < 0.05, "a column of rounding is no direction"


def other_bits(rank: int, world_size: int) -> dict[str, list[str]]:
    """Rows on arithmetic, where all ranks compute the same bits and where the second rounds otherwise."""
    found: dict[str, list[str]] = {}
    methods: list[DDPMethod] = [
        Dion(),
        DeMo(),
        thinwire.PowerSGD(),
        thinwire.LGreCo(thinwire.PowerSGD()),
        thinwire.DDP(),
    ]
    for method in methods:
        for name, scale in (("same", 1.0), ("other", 1 + rank * 1e-6)):
            sample = [each * scale for each in method.sample()]
            object.__setattr__(method, "sample", lambda sample=sample: sample)
            optimizer = torch.optim.SGD((model := DistributedDataParallel(nn.Linear(4, 4))).parameters(), lr=0.1)
            handle = thinwire.compress_ddp(model, method, optimizer=optimizer, announce=False)
            told = [effect for asked, effect, _ in handle.describe() if asked == "equal arithmetic on all ranks"]
            found.setdefault(name, []).extend(told)
            handle.close()
    return found


def test_ranks_that_compute_other_bits_are_named() -> None:
    for found in run_workers(other_bits, 2):
        assert found == {"same": [], "other": ["rank 1 computes other bits than rank 0"] * 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "nearest: 1"),
        ({"momentum": 1.0}, "below 1"),
        ({"codec": "int8+zstd"}, "all have the size it promises; nearest: '"),
        ({"codec": "int5"}, "int"),
    ],
)
def test_what_can_not_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dion(**options)
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="momentum=0"):
        Dion().check(model, torch.optim.AdamW(model.parameters()))
    # What it gives is no gradient, so an optimizer that it does not know may be the wrong one.
    method: DDPMethod
    for method, hint in ((Dion(), "SGD with momentum=0"), (DeMo(), "SGD with momentum=0"), (thinwire.DGC(), "DGCSGD")):
        with pytest.raises(ConfigError, match=f"{method.name} was given no optimizer.*{hint}"):
            method.check(model, None)


def test_a_tensor_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match="dion can't share a mesh with a tensor axis: it makes whole matrices"):
        check_on_mesh(Dion())
