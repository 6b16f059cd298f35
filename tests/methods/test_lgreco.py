"""L-GreCo: the knapsack against every possible choice, and plans that all ranks follow at the same step."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.workers import run_workers
from thinwire import DGC, ConfigError, EFInteger, EFTopK, LGreCo, PowerSGD, Threshold
from thinwire.methods.data.lgreco import LGreCoMean, knapsack
from thinwire.run.config import TrainConfig
from thinwire.run.run import Run

NUM_BINS = 50


def tables(seed: int) -> tuple[list[list[float]], list[list[int]], list[int]]:
    """Errors that fall while sizes grow, of layers that differ in scale, and the uniform choice."""
    random = torch.Generator().manual_seed(seed)
    num_layers = int(torch.randint(1, 6, (), generator=random))
    errors, sizes = [], []
    for _ in range(num_layers):
        count = int(torch.randint(2, 5, (), generator=random))
        scale = 10 ** float(torch.randn((), generator=random))
        errors.append(sorted((scale * torch.rand(count, generator=random)).tolist(), reverse=True))
        sizes.append(sorted(torch.randint(1, 1000, (count,), generator=random).tolist()))
    return errors, sizes, [min(1, len(row) - 1) for row in errors]


def total(rows: list[list[Any]], choice: list[int] | tuple[int, ...]) -> Any:
    return math.fsum(row[one] for row, one in zip(rows, choice, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_within_the_bound_is_smaller(seed: int) -> None:
    errors, sizes, uniform = tables(seed)
    chosen = knapsack(errors, sizes, uniform, num_bins=NUM_BINS)
    budget = total(errors, uniform)
    assert total(errors, chosen) <= budget * (1 + 1e-12)
    bins = [[math.ceil(error / budget * NUM_BINS) for error in row] for row in errors]
    every = itertools.product(*(range(len(row)) for row in errors))
    best = min((total(sizes, one) for one in every if total(bins, one) <= NUM_BINS), default=math.inf)
    assert total(sizes, chosen) == min(best, total(sizes, uniform))


def test_rounding_up_falls_back_to_the_uniform_choice() -> None:
    # Uniform takes 3.5 + 3.5 of 7 bins, each rounded up to 4; every other choice is larger or loses more.
    errors, sizes = [[9.0, 0.5, 0.1]] * 2, [[1, 10, 30]] * 2
    assert knapsack(errors, sizes, [1, 1], num_bins=7) == [1, 1]


def test_what_loses_nothing_costs_nothing() -> None:
    assert knapsack([[0.0, 0.0], [0.0, 0.0]], [[1, 2], [3, 2]], [1, 0]) == [0, 1]
    assert knapsack([[4.0, 0.0], [5.0, 2.0]], [[1, 9], [1, 9]], [1, 1]) == [1, 1]
    assert knapsack([], [], []) == []


def test_more_error_allowed_is_fewer_bytes() -> None:
    errors, sizes = [[2.0, 1.0]] * 10, [[1, 2]] * 10
    assert knapsack(errors, sizes, [1] * 10).count(0) == 0
    assert knapsack(errors, sizes, [1] * 10, alpha=1.35).count(0) == 3


def test_errors_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        knapsack([[math.nan, 1.0]], [[1, 2]], [1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: LGreCo(thinwire.DDP()),  # type: ignore[arg-type]
            "can't plan 'ddp'.*EFTopK",
        ),
        (lambda: LGreCo(PowerSGD(), alpha=0.9), "alpha 0.9 of lgreco-powersgd: must be at least 1; nearest: 1"),
        (lambda: LGreCo(PowerSGD(), span=0.5), "span 0.5"),
        (lambda: LGreCo(EFTopK(), start=3), "start 3 of lgreco-ef-topk: must be at least 10"),
        (lambda: LGreCo(PowerSGD(start_step=15), start=20), "start 20 of lgreco-powersgd: must be at least 25"),
        (
            lambda: LGreCo(DGC(), start=40).for_run(1000, 100),
            "start 40 of lgreco-dgc: must be at least 110; nearest: 110",
        ),
        (lambda: LGreCo(PowerSGD(), every=9), "every 9 .* at least 10"),
        (lambda: LGreCo(EFInteger(), samples=0), "samples 0 of lgreco-ef-integer"),
        (lambda: EFTopK("topk200%"), "density 2.0"),
        (lambda: EFInteger("int5"), "bits 5 is not one of"),
    ],
)
def test_bad_settings_name_the_value_and_a_valid_one(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_plans_come_at_their_steps() -> None:
    method = LGreCo(PowerSGD(), start=20, every=50, samples=10)
    assert [step for step in range(200) if method.steps_to_plan(step) == 0] == [19, 69, 119, 169]
    assert [step for step in range(60) if method.steps_to_plan(step) < method.samples] == list(range(10, 20))


def test_the_first_plan_waits_until_the_method_has_settled() -> None:
    assert LGreCo(PowerSGD()).settled_after == 20 and LGreCo(PowerSGD(start_step=15)).settled_after == 25
    # A tenth of the run at other densities, then ten steps of samples.
    assert LGreCo(DGC()).for_run(400, 40).settled_after == 50


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (EFTopK("topk2%"), 0.02),
        (EFTopK("threshold2%/4096:stride8"), 0.02),
        (EFInteger(), 4),
        (PowerSGD(rank=3), 3),
        (DGC(density=0.02, stride=1), 0.02),
    ],
)
def test_candidates_hold_the_uniform_setting_and_their_errors_fall(method: Any, setting: float) -> None:
    x = torch.randn(64, 80, generator=torch.Generator().manual_seed(0))
    candidates = method.candidates(x.shape, 4.0)
    assert setting in candidates and candidates == sorted(candidates)
    errors = method.errors(x, candidates)
    sizes = [method.size(x.shape, one) for one in candidates]
    assert errors == sorted(errors, reverse=True) and sizes == sorted(sizes)
    assert method.candidates(torch.Size([5120]), 4.0) == []
    # DGC compresses every matrix.
    assert method.candidates(torch.Size([5, 5]), 4.0) == [] or isinstance(method, DGC)


def test_the_tensor_that_is_of_low_rank_gets_a_low_rank() -> None:
    """Two matrices of 128 x 128, one of rank 2, one of noise; uniformly rank 4."""
    random = torch.Generator().manual_seed(0)
    low = 20 * torch.randn(128, 2, generator=random) @ torch.randn(2, 128, generator=random)
    noise = torch.randn(128, 128, generator=random)
    method = PowerSGD(rank=4)
    candidates = method.candidates(low.shape, 2.0)
    assert candidates == [2, 3, 4, 5, 6, 7, 8]
    errors = [method.errors(x, candidates) for x in (low, noise)]
    for x, row in ((low, errors[0]), (noise, errors[1])):
        singular = torch.linalg.svdvals(x.double())
        expected = [float(singular[int(rank) :].norm()) for rank in candidates]
        assert row == pytest.approx(expected, abs=1e-4 * float(singular[0]))
    sizes = [[method.size(low.shape, rank) for rank in candidates]] * 2
    assert sizes[0][0] == 4 * 2 * (128 + 128)
    # Rounding to fp32 leaves the matrix of rank 2 a rest, so that rank 2 loses a little more than rank 4.
    assert [candidates[choice] for choice in knapsack(errors, sizes, [2, 2], alpha=1.001)] == [2, 4]
    assert [candidates[choice] for choice in knapsack(errors, sizes, [2, 2])] == [2, 5]


def test_a_stride_estimates_the_bound() -> None:
    assert EFTopK("threshold1%/4096").codec_at(0.05) == Threshold(0.05, 4096, stride=32)


def test_flags_reach_the_method_underneath() -> None:
    config = TrainConfig(
        strategy="lgreco-ef-integer",
        tables={"lgreco": {"every": 50}, "efinteger": {"codec": "int3:nearest"}, "eftopk": {}},
    )
    run = Run.of(config)
    assert run.strategy == LGreCo(EFInteger("int3:nearest"), every=50)
    assert run.used_tables == {"llama", "lgreco", "efinteger"}


SHAPES = {"sparse": (64, 64), "dense": (64, 64), "vector": (64,)}
METHOD = LGreCo(EFTopK("topk10%/64"), start=3, every=3, samples=2)


class Numbers(nn.Module):
    """Parameters whose gradients are what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.numbers[name] * gradients[name]).sum() for name in SHAPES]).sum()


def gradient(rank: int, step: int) -> dict[str, Tensor]:
    """One matrix with 3 large entries of 64 in each row, on rank 0 alone; one of noise; a vector."""
    random = torch.Generator().manual_seed(100 * step + rank)
    sparse = torch.zeros(64, 64)
    sparse[:, : 3 if rank == 0 else 64] = 10.0
    return {"sparse": sparse, "dense": torch.randn(64, 64, generator=random), "vector": torch.ones(64)}


def settings_of(handle: thinwire.CompressedDDP) -> dict[str, float]:
    """What is in effect, by parameter."""
    assert isinstance(handle.reduction, LGreCoMean)
    return dict(handle.reduction.base.settings)


def planned(rank: int, world_size: int) -> dict[str, Any]:
    model = Numbers()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    handle = thinwire.compress_ddp(ddp, METHOD, seed=1, announce=False)
    told: dict[str, Any] = {"plans": [], "sent": [], "formula": [], "first": handle.describe()}
    sampled = {name: torch.zeros(64, 64) for name in ("sparse", "dense")}
    for step in range(7):
        for name, summed in sampled.items() if step in (1, 2) else ():
            summed += gradient(rank, step)[name] + handle.residuals()[f"numbers.{name}"]
        before = handle.meter.snapshot().sent_bytes
        ddp(gradient(rank, step)).backward()
        model.zero_grad()
        told["plans"].append(settings_of(handle))
        told["sent"].append(handle.meter.snapshot().sent_bytes - before)
        told["formula"].append(handle.bytes_per_step)
        if step == 4:
            # In the middle of a sampling window.
            told["saved"] = handle.state_dict()
        if step == 2:
            assert isinstance(handle.reduction, LGreCoMean) and handle.reduction.plan is not None
            told["uniform_error"] = handle.reduction.plan.uniform_error
    told["expected_error"] = sum(METHOD.base.errors(x, [0.1])[0] for x in sampled.values())
    told["rows"] = handle.describe()
    told["last"] = handle.reduction.state.state_dict()["saved_plan"]
    handle.close()

    model = Numbers()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    handle = thinwire.compress_ddp(ddp, METHOD, seed=1, announce=False)
    handle.load_state_dict(told.pop("saved"))
    assert settings_of(handle) == told["plans"][4]
    told["resumed"] = []
    for step in range(5, 7):
        ddp(gradient(rank, step)).backward()
        model.zero_grad()
        told["resumed"].append(settings_of(handle))
    assert handle.reduction.state.state_dict()["saved_plan"] == told["last"]
    handle.close()
    return told


def test_all_ranks_follow_rank_0s_plan_from_the_same_step() -> None:
    told = run_workers(planned, 2, local_size=1)
    plans = told[0]["plans"]
    assert told[1]["plans"] == plans
    # After steps 2 and 5, numbered from 0.
    assert plans[:2] == [{}, {}] and plans[2] == plans[4] and plans[5] == plans[6]
    # What rank 0 put in after the first step, with its residual from before.
    assert told[0]["uniform_error"] == pytest.approx(told[0]["expected_error"], rel=1e-5)
    assert told[1]["uniform_error"] == told[0]["uniform_error"] != pytest.approx(told[1]["expected_error"], rel=1e-3)
    plan = plans[2]
    # 3 of 64 hold all of one matrix, so that the other may lose less at the same bytes; on rank 1 it is the reverse.
    assert plan["numbers.sparse"] < 0.1
    for one in told:
        assert one["resumed"] == plans[5:]
        for step in (1, 3, 4):
            assert one["sent"][step] == one["formula"][step]
        assert one["formula"][3] < one["formula"][0]
    # Two settings and three errors, 8 bytes each, from rank 0 alone.
    assert told[0]["sent"][2] - told[0]["sent"][1] == 40 and told[1]["sent"][2] == told[1]["sent"][1]
    effects = {asked: effect for asked, effect, _ in told[0]["rows"]}
    assert effects["plan: numbers.sparse"] == f"{plans[6]['numbers.sparse']:g}"
    assert any(asked == "plan in effect" and effect.startswith("none yet") for asked, effect, _ in told[0]["first"])


def planned_dgc(rank: int, world_size: int) -> dict[str, Any]:
    """DGC on two nodes of two ranks, which hold slices of what is accumulated."""
    model = Numbers()
    base = DGC(density=0.1, momentum=0.0, clip=0.0, warmup=(0.5,), warmup_steps=1, group=64, stride=1)
    method = LGreCo(base, start=3, every=3, samples=2)
    optimizer = thinwire.DGCSGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model)
    handle = thinwire.compress_ddp(ddp, method, optimizer=optimizer, local_size=2, announce=False)
    told: dict[str, Any] = {"plans": [], "sent": [], "formula": []}
    accumulated = {name: torch.zeros(2048) for name in ("sparse", "dense")}
    for step in range(5):
        for name, total in accumulated.items() if step in (1, 2) else ():
            mean = torch.stack([gradient(peer, step)[name] for peer in (0, 1)]).mean(0).view(-1)
            unsent = handle.residuals()[f"numbers.{name}"].view(-1) / 2
            total += (mean + unsent)[:2048]
        before = handle.meter.snapshot().sent_bytes
        ddp(gradient(rank, step)).backward()
        model.zero_grad()
        told["plans"].append(settings_of(handle))
        told["sent"].append(handle.meter.snapshot().sent_bytes - before)
        told["formula"].append(handle.bytes_per_step)
    assert isinstance(handle.reduction, LGreCoMean) and handle.reduction.plan is not None
    told["uniform_error"] = handle.reduction.plan.uniform_error
    told["expected_error"] = sum(base.errors(x, [0.1])[0] for x in accumulated.values())
    handle.close()
    return told


def test_dgc_gets_a_density_for_each_tensor() -> None:
    told = run_workers(planned_dgc, 4, local_size=2)
    plan = told[0]["plans"][2]
    # In rank 0's node half of the mean of one matrix is in 3 of 64 columns.
    assert plan["numbers.sparse"] != plan["numbers.dense"] and told[0]["plans"][1] == {}
    for one in told:
        assert one["plans"] == told[0]["plans"]
        assert one["sent"][3:] == one["formula"][3:] and one["formula"][4] < one["formula"][1]
    assert told[0]["uniform_error"] == pytest.approx(told[0]["expected_error"], rel=1e-5)


def spoiled(rank: int, world_size: int) -> list[dict[str, float]]:
    """A gradient that is not finite in the step of the first plan."""
    model = Numbers()
    ddp = DistributedDataParallel(model)
    handle = thinwire.compress_ddp(ddp, METHOD, seed=1, announce=False)
    plans = []
    for step in range(6):
        given = gradient(rank, step)
        if (rank, step) == (0, 2):
            given["dense"][3, 3] = math.nan
        ddp(given).backward()
        model.zero_grad()
        plans.append(settings_of(handle))
    handle.close()
    return plans


def test_a_plan_is_left_out_where_gradients_are_not_finite() -> None:
    for plans in run_workers(spoiled, 2, local_size=1):
        assert plans[:5] == [{}] * 5
        assert plans[5]["numbers.sparse"] < 0.1
