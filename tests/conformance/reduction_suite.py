"""Every way to average DDP's gradients, under `compress_ddp` in a loop of one's own: a row here inherits these tests.

Gradients are set, not trained: the loss is the sum of parameters times chosen numbers, so that what a method gives back
can be held against what it was given.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.workers import Rows, run_rows, run_workers
from thinwire.codecs import Identity
from thinwire.methods.data.demo import DeMo
from thinwire.methods.data.dion import Dion
from thinwire.methods.data.ef21 import EF21
from thinwire.methods.ddp import DDPMethod

SHAPES = {
    "embed": (37, 24),
    "norm": (24,),
    "up": (50, 24),
    "tiny": (1,),
    "scalar": (),
    "conv": (6, 5, 3, 3),
    "empty": (0, 24),
    "thin": (300, 1),
    "head": (24, 37),
}
STEPS = 6


@dataclass(frozen=True)
class Row:
    method: DDPMethod
    # Largest |out - mean| / |mean| of one step over all gradients; 0: the same within 1e-6.
    error: float
    # Whether what is not sent stays as a residual: sum of outputs + mean of `residuals` = sum of the means put in.
    keeps_residual: bool = True
    # (world size, ranks per node).
    grid: tuple[int, int] = (4, 2)
    # The optimizer that the method asks for.
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    # Whether what is averaged is the gradient, and not, say, a momentum.
    averages_gradients: bool = True
    # Steps at the start that are another method's.
    warmup: int = 0
    # Whether bytes are those of the formula; not where packets differ in length.
    counted: bool = True
    # Largest difference that other buckets may make: sums by gloo are rounded by their place in a bucket.
    bucket_error: float = 0.0
    # Whether another row has the same jobs, and is held to what happens when one of them fails.
    variant: bool = False


ROWS: dict[str, Row] = {
    "ddp": Row(thinwire.DDP(), 0.0, keeps_residual=False, bucket_error=1e-6),
    "ddp-bf16": Row(
        thinwire.DDP(codec="bf16"), 0.02, keeps_residual=False, grid=(2, 1), bucket_error=0.1, variant=True
    ),
    "powersgd": Row(thinwire.PowerSGD(start_step=2), 1.2, warmup=2),
    "powersgd-bf16": Row(thinwire.PowerSGD(rank=2, start_step=0, codec="bf16"), 1.2, grid=(2, 1), variant=True),
    "powersgd-int8": Row(thinwire.PowerSGD(rank=2, start_step=0, codec="int8/128:bf16:nearest"), 1.2, variant=True),
    "powersgd-int4": Row(
        thinwire.PowerSGD(rank=2, start_step=0, codec="int4/64:bf16:nearest"), 1.2, grid=(2, 1), variant=True
    ),
    "ef-topk": Row(thinwire.EFTopK("topk10%"), 1.5),
    "ef-integer": Row(thinwire.EFInteger(), 0.2, grid=(2, 1), variant=True),
    # Differences of gradients that are all new: the first is the gradient, and none gets smaller.
    "ef21": Row(EF21("topk10%/64", fresh=1.0), 2.0, keeps_residual=False),
    "ef21-exact": Row(EF21("fp32", fresh=1.0), 0.0, keeps_residual=False, grid=(2, 1), variant=True),
    "ef21-momentum": Row(EF21("sign/64", fresh=0.3), 0.0, keeps_residual=False, averages_gradients=False, variant=True),
    "diana": Row(EF21("int4/64", fresh=1.0, shift=0.5), 0.5, keeps_residual=False, grid=(2, 1), variant=True),
    # Planned after the second step, on both steps' gradients.
    "lgreco-ef-topk": Row(thinwire.LGreCo(thinwire.EFTopK("topk10%"), start=2, samples=2), 1.5, warmup=2, variant=True),
    "lgreco-ef-integer": Row(
        thinwire.LGreCo(thinwire.EFInteger(), start=2, samples=2), 0.3, grid=(2, 1), warmup=2, variant=True
    ),
    "lgreco-powersgd": Row(
        thinwire.LGreCo(thinwire.PowerSGD(rank=2, start_step=1), start=3, samples=2),
        1.2,
        grid=(2, 1),
        warmup=3,
        variant=True,
    ),
    "sketch": Row(thinwire.Sketch(), 4.0, keeps_residual=False),
    "sketch-feedback": Row(thinwire.Sketch("gaussiansketch4:biased"), 1.5, grid=(2, 1), variant=True),
    "two-way-sign": Row(thinwire.TwoWay(min_bytes=500), 1.0),
    "two-way-topk": Row(thinwire.TwoWay("topk10%/1024", min_bytes=500), 1.0, grid=(4, 1), variant=True),
    "two-way-randomk": Row(thinwire.TwoWay("randomk25%:bf16:biased", min_bytes=500), 1.5, grid=(2, 2), variant=True),
    "two-way-natural": Row(
        thinwire.TwoWay("e3m0", min_bytes=500), 0.4, keeps_residual=False, grid=(2, 1), variant=True
    ),
    "two-way-integer": Row(thinwire.TwoWay("int4:nearest", min_bytes=500), 0.5, grid=(2, 1), variant=True),
    # Without momentum and clipping it is gradients that are accumulated.
    "dgc": Row(
        thinwire.DGC(density=0.1, momentum=0.0, clip=0.0, warmup=(0.5,), warmup_steps=2, values="bf16"), 2.0, warmup=2
    ),
    "dgc-momentum": Row(
        thinwire.DGC(density=0.02, nesterov=True, clip=2.0, warmup=(0.25,), warmup_steps=2),
        0.0,
        keeps_residual=False,
        grid=(3, 1),
        optimizer=lambda params: thinwire.DGCSGD(params, lr=0.1, nesterov=True),
        averages_gradients=False,
        warmup=2,
        variant=True,
    ),
    "lgreco-dgc": Row(
        thinwire.LGreCo(
            thinwire.DGC(density=0.1, momentum=0.0, clip=0.0, warmup=(0.5,), warmup_steps=1), start=3, samples=2
        ),
        2.0,
        warmup=3,
        variant=True,
    ),
    "demo": Row(DeMo(density=0.05, chunk=16), 0.0, keeps_residual=False, averages_gradients=False),
    "demo-sign": Row(
        DeMo(density=0.05, chunk=16, values="sign/32:bf16"),
        0.0,
        keeps_residual=False,
        grid=(2, 1),
        averages_gradients=False,
        variant=True,
    ),
    "dion": Row(Dion(rank=3), 0.0, keeps_residual=False, averages_gradients=False),
    "dion-int8": Row(
        Dion(rank=2, codec="int8/64:nearest"),
        0.0,
        keeps_residual=False,
        grid=(2, 1),
        averages_gradients=False,
        variant=True,
    ),
    # A number of ranks that no buffer of a power of two is cut by evenly.
    "ef21-three": Row(
        EF21("sign/64", fresh=0.5), 0.0, keeps_residual=False, grid=(3, 1), averages_gradients=False, variant=True
    ),
    "dion-three": Row(
        Dion(rank=3, codec="bf16"), 0.0, keeps_residual=False, grid=(3, 1), averages_gradients=False, variant=True
    ),
    "onebit-adam": Row(
        thinwire.OneBitAdam(freeze=2, clip=30.0),
        0.0,
        keeps_residual=False,
        optimizer=lambda params: thinwire.OneBitAdamW(params, lr=0.01),
        averages_gradients=False,
        warmup=2,
    ),
}


class Numbers(nn.Module):
    """Parameters of awkward shapes; the forward pass makes each one's gradient what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.numbers[name] * gradients[name]).sum() for name in SHAPES]).sum()


def gradient(rank: int, step: int) -> dict[str, Tensor]:
    """What rank puts in at a step: a part that all share, so that the mean is not noise, and a part of its own."""
    shared, own = torch.Generator().manual_seed(step), torch.Generator().manual_seed(1000 * (rank + 1) + step)
    return {
        name: torch.randn(shape, generator=shared) + 0.5 * torch.randn(shape, generator=own)
        for name, shape in SHAPES.items()
    }


def mean_gradient(world_size: int, step: int) -> dict[str, Tensor]:
    parts = [gradient(rank, step) for rank in range(world_size)]
    return {name: torch.stack([part[name].double() for part in parts]).mean(0) for name in SHAPES}


class Harness:
    """A model in DDP, compressed by a row's method, that is given chosen gradients."""

    def __init__(self, row: Row, rank: int, *, bucket_mb: float = 25.0, seed: int = 3) -> None:
        self.rank = rank
        self.model = Numbers()
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=bucket_mb)
        make = row.optimizer or (lambda params: torch.optim.SGD(params, lr=0.1))
        self.optimizer = make(list(self.model.parameters()))
        self.handle = thinwire.compress_ddp(
            self.ddp,
            row.method,
            optimizer=self.optimizer,
            local_size=row.grid[1],
            seed=seed,
            announce=False,
        )

    def put(self, step: int, *, spoil: bool = False) -> dict[str, Tensor]:
        """One backward and one step; what the method leaves in `.grad`."""
        given = gradient(self.rank, step)
        if spoil:
            given["up"][3, 3] = math.nan
        self.ddp(given).backward()
        out = {name: param.grad.clone() for name, param in self.model.numbers.items() if param.grad is not None}
        if all(bool(torch.isfinite(grad).all()) for grad in out.values()):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return out

    def residuals(self) -> dict[str, Tensor]:
        """What this rank has been given and not passed on, in units of a rank's gradient."""
        return {name.removeprefix("numbers."): residual for name, residual in self.handle.residuals().items()}

    def close(self) -> None:
        self.handle.close()


def as_reported(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Everything that the tests look at, from one start of the processes."""
    row = ROWS[name]
    told: dict[str, Any] = {}

    plain = Harness(row, rank)
    told["outs"], told["sent"] = [], []
    for step in range(STEPS):
        before = plain.handle.meter.snapshot().sent_bytes
        told["outs"].append(plain.put(step))
        told["sent"].append(plain.handle.meter.snapshot().sent_bytes - before)
        if step == STEPS // 2 - 1:
            saved = plain.handle.state_dict(), copy.deepcopy(plain.optimizer.state_dict())
            saved_weights = {key: value.clone() for key, value in plain.model.state_dict().items()}
    told["formula"] = plain.handle.bytes_per_step
    told["residual"] = plain.residuals()
    told["rows"] = plain.handle.describe()
    plain.close()

    resumed = Harness(row, rank, seed=3)
    resumed.model.load_state_dict(saved_weights)
    resumed.optimizer.load_state_dict(saved[1])
    resumed.handle.load_state_dict(saved[0])
    told["resumed"] = [resumed.put(step) for step in range(STEPS // 2, STEPS)]
    # Not on the rank that owns the first elements, and remembers what became of them.
    told["spoiled"] = resumed.put(STEPS, spoil=rank == 1)
    told["healed"] = [resumed.put(STEPS + 1), resumed.put(STEPS + 2)]
    resumed.close()

    if not row.method.single_bucket:
        # 2 kB a bucket: most tensors are buckets of their own.
        cut = Harness(row, rank, bucket_mb=0.002)
        told["cut"] = [cut.put(step) for step in range(STEPS)]
        cut.close()
    return told


# What rows told that shared a start of the processes, by their grid.
_told: dict[tuple[int, int], Rows] = {}


@pytest.fixture(scope="module", params=ROWS)
def reported(request: pytest.FixtureRequest) -> tuple[Row, list[dict[str, Any]]]:
    grid = ROWS[request.param].grid
    if grid not in _told:
        cases: list[Any] = [getattr(item, "callspec", None) for item in request.session.items]
        selected = {case.params["reported"] for case in cases if case and "reported" in case.params}
        names = [name for name, row in ROWS.items() if name in selected and row.grid == grid]
        _told[grid] = run_rows(as_reported, names, grid[0], local_size=grid[1])
    return ROWS[request.param], _told[grid].of(request.param)


Reported = tuple[Row, list[dict[str, Any]]]


def flat(out: dict[str, Tensor]) -> Tensor:
    return torch.cat([out[name].reshape(-1).double() for name in SHAPES])


def test_replicas_get_the_same_bits(reported: Reported) -> None:
    _, told = reported
    for one in told[1:]:
        for step in range(STEPS):
            assert torch.equal(flat(one["outs"][step]), flat(told[0]["outs"][step]))


def test_output_is_near_the_mean(reported: Reported) -> None:
    row, told = reported
    if not row.averages_gradients:
        pytest.skip("what travels is not the gradient; the method's own tests hold it to its reference")
    for step in range(STEPS):
        mean = flat(mean_gradient(len(told), step))
        off = float((flat(told[0]["outs"][step]) - mean).norm() / mean.norm())
        assert off <= (row.error or 1e-6), (step, off)


def test_nothing_is_lost(reported: Reported) -> None:
    row, told = reported
    if not row.keeps_residual:
        pytest.skip("the method keeps no residual")
    put_in = torch.stack([flat(mean_gradient(len(told), step)) for step in range(STEPS)]).sum(0)
    came_out = torch.stack([flat(out) for out in told[0]["outs"]]).sum(0)
    residual = torch.stack([flat(one["residual"]) for one in told]).mean(0)
    assert float(residual.norm()) > 0
    assert float((came_out + residual - put_in).abs().max() / put_in.abs().max()) < 1e-6


def test_resumed_run_gives_the_same_bits(reported: Reported) -> None:
    row, told = reported
    for one in told:
        for whole, resumed in zip(one["outs"][STEPS // 2 :], one["resumed"], strict=True):
            # DDP's first bucket after a start holds everything.
            assert float((flat(whole) - flat(resumed)).abs().max()) <= row.bucket_error


def test_buckets_do_not_matter(reported: Reported) -> None:
    row, told = reported
    if row.method.single_bucket:
        pytest.skip("the method takes all gradients at once")
    for whole, cut in zip(told[0]["outs"], told[0]["cut"], strict=True):
        assert float((flat(whole) - flat(cut)).abs().max()) <= row.bucket_error


def test_a_gradient_that_is_not_finite_reaches_all_and_stays_nowhere(reported: Reported) -> None:
    _, told = reported
    for one in told:
        assert not torch.isfinite(one["spoiled"]["up"]).all()
        for out in one["healed"]:
            assert torch.isfinite(flat(out)).all()


def test_bytes_are_those_of_the_formula(reported: Reported) -> None:
    row, told = reported
    if not row.counted:
        pytest.skip("the packets' lengths depend on the values")
    for one in told:
        # One rounding down for each message and tensor of an all_reduce by gloo.
        assert one["sent"][row.warmup :] == pytest.approx([one["formula"]] * (STEPS - row.warmup), abs=2 * len(SHAPES))


def crash(rank: int, world_size: int, name: str) -> str:
    harness = Harness(ROWS[name], rank)
    harness.put(0)
    if rank == 1:

        def fails(*_: Any, **__: Any) -> Any:
            raise ArithmeticError("no packet today")

        reduction: Any = harness.handle.reduction
        if codecs := {type(codec) for codec in ROWS[name].method.codecs} - {Identity}:
            for codec in codecs:
                codec.encode = fails  # type: ignore[method-assign]
        else:
            reduction.run = fails
    with pytest.raises((ArithmeticError, thinwire.PeerLostError)) as caught:
        for step in range(1, 4):
            harness.put(step)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.variant])
def test_a_crash_on_one_rank_stops_all_with_its_name(name: str) -> None:
    told = run_workers(crash, 2, name, local_size=1, may_die=(1,))
    assert told[0].startswith("PeerLostError") and "rank 1" in told[0], told
