"""DistributedDataParallel under thinwire: buckets, options, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.strategy_suite import Net, Replica, batch, make_optimizer
from tests.workers import run_workers
from thinwire import (
    DGC,
    DGCSGD,
    ConfigError,
    EFTopK,
    LGreCo,
    OneBitAdam,
    OneBitAdamW,
    PowerSGD,
    Sketch,
    TwoWay,
    compress_ddp,
)
from thinwire.collectives import Topology
from thinwire.compose import apply
from thinwire.methods.data.torch_powersgd import TorchPowerSGD
from thinwire.methods.data.zero_compressed import ZeroCompressed
from thinwire.methods.interface import Method
from thinwire.methods.plain_ddp import DDP
from thinwire.registry import strategy_named
from thinwire.state.clipping import Clipping
from thinwire.state.memory import Place


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("ddp", {"codec": "bf61"}, "codec 'bf61' of DDP.*did you mean 'bf16'"),
        ("ddp", {"codec": "int4"}, "codec 'int4' of DDP: must be fp32 or bf16.*nearest: 'fp32'"),
        ("powersgd", {"rank": 0}, "rank 0 of powersgd: must be at least 1; nearest: 1"),
        ("powersgd", {"start_step": -1}, "start_step -1 of powersgd: must be at least 0"),
        ("powersgd", {"codec": "bf61"}, "codec 'bf61' of PowerSGD.*did you mean 'bf16'"),
        ("powersgd", {"codec": "int2"}, "codec 'int2' of PowerSGD: error feedback needs.*nearest: 'int2/128:nearest'"),
        ("powersgd-torch", {"start_step": 1}, "start_step 1 of powersgd-torch: must be at least 2"),
        ("two-way", {"codec": "topc"}, "'topc' of TwoWay.*did you mean 'topk1%'"),
        ("two-way", {"codec": "topk", "error_feedback": False}, "'topk' of TwoWay: .*must be unbiased"),
        ("two-way", {"codec": "int4:nearest", "error_feedback": False}, "must be unbiased.*nearest: 'int4/128'"),
        ("two-way", {"codec": "randomk1%", "error_feedback": True}, "a contraction.*nearest: 'randomk1%:biased'"),
        ("two-way", {"codec": "int5"}, "bits 5.*nearest is 4"),
        ("two-way", {"codec": "randomk90%"}, "randomk 90%: must be 1 of a whole number"),
        ("zero-compressed", {"gradients": "fp16"}, "'fp16' of ZeroCompressed: error feedback needs"),
        (
            "zeropp",
            {"weights": "int8"},
            "weights 'int8' of ZeroPP: .*rounded the same way.*nearest: 'int8/128:nearest'",
        ),
        ("frontier", {"weights": "int8/64+hadamard32"}, "nearest: 'int8/64:nearest.hadamard32'"),
        ("ef-integer", {"codec": "int4"}, "codec 'int4' of EFInteger: must be.*nearest: 'int4/128:nearest'"),
        ("ef-topk", {"codec": "sign"}, "codec 'sign' of EFTopK: must be topk.*nearest: 'topk1%/4096'"),
        ("dgc", {"values": "fp16"}, "values 'fp16' of DGC.*nearest: 'fp32'"),
        ("two-way", {"threads": 0}, "threads 0 of two-way: must be at least 1"),
        ("powersgd", {"min_compression": float("nan")}, "min_compression nan"),
        ("fsdp", {"codec": "fp16"}, "'fp16' of FSDP: must be fp32 or bf16"),
    ],
)
def test_refused_options_say_why(strategy: str, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        strategy_named(strategy, **options)


def test_names_are_those_of_the_command_line() -> None:
    for name in ("ddp", "ddp-bf16", "powersgd", "powersgd-torch", "two-way", "fsdp", "fsdp-bf16"):
        assert strategy_named(name).name == name


def wrapped(model: nn.Module, strategy: Method, checked: bool = False, make: Any = torch.optim.SGD) -> tuple:
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return apply(strategy,
        model, optimizer, local_size=1, seed=0, timeout_s=300, checked=checked, overlap=True
    )  # fmt: skip


def num_reductions(rank: int, world_size: int, strategy: Method) -> list[int]:
    """All-reduces of each step, for a model of which DDP makes two buckets."""
    model = nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(2)))
    ddp, optimizer = wrapped(model, strategy)
    calls = []
    for _ in range(3):
        before = optimizer.meter.snapshot()
        ddp(torch.ones(1, 600)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        calls.append((optimizer.meter.snapshot() - before).operations["gradients", "inter"].calls)
    return calls


@pytest.mark.parametrize(("strategy", "expected"), [(DDP(), [2, 2, 2]), (TorchPowerSGD(start_step=2), [1, 1, 1])])
def test_buckets_are_laid_out_before_the_first_step(strategy: Method, expected: list[int]) -> None:
    """Of DDP several, so that they overlap with backward; PowerSGD's hook is safe with a single one."""
    for calls in run_workers(num_reductions, 2, strategy):
        assert calls == expected


def mistakes(rank: int, world_size: int) -> dict[str, str]:
    found: dict[str, str] = {}

    replica = Replica("ddp", rank, world_size, seed=0)
    with pytest.raises(ConfigError) as early:
        replica.optimizer.step()
    found["early"] = str(early.value)

    with replica.optimizer.no_sync():
        replica.wrapped(batch(0), True).backward()
    with pytest.raises(ConfigError) as unsent:
        replica.optimizer.step()
    found["unsent"] = str(unsent.value)

    replica = Replica("ddp", rank, world_size, seed=0)
    replica.wrapped(batch(0), False).backward()
    with pytest.raises(ConfigError) as unused:
        replica.optimizer.step()
    found["unused"] = str(unused.value)

    replica = Replica("ddp", rank, world_size, seed=0)
    replica.backward(0)
    with pytest.raises(RuntimeError) as twice:
        replica.backward(0)
    found["twice"] = str(twice.value)

    model = Net(seed=0)
    optimizer = make_optimizer(model)
    optimizer.param_groups[1]["params"].pop()
    model.fixed.requires_grad_(True)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ConfigError) as missing:
        apply(DDP(), model, optimizer, local_size=1, seed=0, timeout_s=300, checked=False, overlap=True)
    found["missing"] = str(missing.value)

    with pytest.raises(ConfigError) as other:
        wrapped(nn.Linear(2, 2 + rank), DDP())
    found["other"] = str(other.value)
    return found


def test_mistakes_are_refused_with_the_way_out() -> None:
    for found in run_workers(mistakes, 2):
        assert found["early"].startswith("no backward has run")
        assert found["unsent"].startswith("no backward that sends") and "optimizer.no_sync()" in found["unsent"]
        assert "'side.weight'" in found["unused"] and "find_unused_parameters" in found["unused"]
        assert "optimizer.no_sync()" in found["twice"]
        assert "is not in the optimizer" in found["missing"]
        assert "rank 1 has another model than rank 0" in found["other"]


def test_a_process_group_is_needed() -> None:
    with pytest.raises(ConfigError, match="init_process_group first"):
        wrapped(nn.Linear(2, 2), DDP())


def rows(rank: int, world_size: int) -> list[tuple[str, str, str]]:
    return wrapped(nn.Linear(64, 64), TorchPowerSGD(), checked=True)[1].describe()


def test_the_start_table_says_what_is_in_effect() -> None:
    described = {asked: effect for asked, effect, _ in run_workers(rows, 2)[0]}
    assert described["--checked"] == "no effect on gradients"
    assert described["gradients"] == "1 of 2 as factors of rank 4, the others in fp32"
    assert described["bytes sent"].startswith("by formula")
    # (64 + 64) * 4 + 64 elements of 4 bytes, 2 (P-1)/P of them, and 17 bytes of agreement.
    assert described["sent per rank and step"] == f"{(576 * 4 + 17) / 1e3:.3f} kB"


def test_a_rank_above_every_matrix_is_warned_of() -> None:
    for rank, warned in ((100_000, "2 times smaller; nearest: rank 15"), (4, "")):
        place = Place({"weight": torch.Size([64, 64]), "bias": torch.Size([64])}, Topology(2, 1), 0)
        whys = [why for asked, _, why in PowerSGD(rank=rank).reduction(place, 0).rows() if asked == "WARNING"]
        assert whys[0].endswith(warned) if warned else not whys


WITH_RESIDUALS: tuple[Method, ...] = (
    EFTopK("topk10%"),
    TwoWay(min_bytes=0),
    Sketch("countsketch4:biased"),
    LGreCo(EFTopK("topk10%")),
    PowerSGD(rank=2, start_step=0),
    ZeroCompressed(),
)


def residual_of(optimizer: Any) -> torch.Tensor:
    """All that this rank has not passed on, in one."""
    is_sharded = hasattr(optimizer, "buckets")
    state = optimizer.memory.state if is_sharded else optimizer._reducer.reduction.state
    return torch.cat([error.flatten() for error in state.residuals().values()])


def clipped(rank: int, world_size: int) -> list[tuple[float, float]]:
    """By method: by how much clipping shortened the mean gradient, and this rank's residual."""
    told = []
    for strategy in WITH_RESIDUALS:
        ddp, optimizer = wrapped(nn.Linear(40, 40, bias=False), strategy)
        for step in range(2):
            ddp(torch.randn(8, 40, generator=torch.Generator().manual_seed(2 * step + rank))).square().sum().backward()
            norm = float(optimizer.clip_grad_norm_(math.inf))
            residual = residual_of(optimizer)
            optimizer.clip_grad_norm_(0.01)
            left = residual_of(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        told.append((0.01 / norm, float(left.norm() / residual.norm())))
        optimizer.close()
    # Methods that clip for themselves, by an option of that name, keep no residual that the step's clipping must scale.
    for own, make in ((DGC(warmup=()), DGCSGD), (OneBitAdam(freeze=2), OneBitAdamW)):
        ddp, optimizer = wrapped(nn.Linear(40, 40, bias=False), own, make=make)
        ddp(torch.ones(8, 40)).square().sum().backward()
        assert optimizer.clip_grad_norm_(0.01) > 0.01
        optimizer.step()
        optimizer.close()
    model = nn.parallel.DistributedDataParallel(nn.Linear(40, 40, bias=False))
    handle = compress_ddp(model, EFTopK("topk10%"), announce=False)
    model(torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    (residual,) = (value.clone() for value in handle.residuals().values())
    norm = float(handle.clip_grad_norm_(0.01))
    (left,) = handle.residuals().values()
    handle.close()
    return [*told, (0.01 / norm, float(left.norm() / residual.norm()))]


def test_what_is_owed_follows_a_step_that_is_clipped_by_more_than_the_last() -> None:
    clipping = Clipping()
    shares = [clipping.note(norm, 1.0).share for norm in (0.5, 40.0, 40.0, 20.0, math.nan, 200.0, 0.1)]
    assert shares == pytest.approx([1.0, 1 / 40, 1.0, 1.0, 1.0, 0.1, 1.0], rel=1e-5)
    assert [clipping.note(2.0, max_norm).share for max_norm in (0.0, 1.0)] == pytest.approx([0.0, 0.5], rel=1e-5)


def test_what_is_owed_is_clipped_with_what_came_out() -> None:
    for told in run_workers(clipped, 2):
        for shortened, left in told:
            assert shortened < 0.1
            assert left == pytest.approx(shortened, rel=1e-4)
