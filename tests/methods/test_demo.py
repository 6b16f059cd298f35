"""DeMo over ranks against its algorithm in double precision, and without a loss against the sign of the mean."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import numba
import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.methods.test_compressed import Matrices, gradients
from tests.workers import run_workers
from thinwire.codecs.backends import without_kernels
from thinwire.codecs.cosines import turns
from thinwire.collectives import Topology
from thinwire.errors import ConfigError, Problems
from thinwire.launch.prepare import prepare
from thinwire.methods.data.demo import DeMo, block_sides, codec_of_shape, from_blocks, to_blocks
from thinwire.run.config import TrainConfig

# A matrix and a vector that no chunk divides, and a stack of matrices.
SHAPES = ((7, 54), (29,), (3, 16, 12))
STEPS = 4
SPARSE = DeMo(density=0.1, chunk=8, values="fp32", beta=0.9)
EXACT = DeMo(density=1.0, chunk=8, values="fp32", beta=0.0)
DRAWN = DeMo(density=1.0, chunk=8, values="int4", beta=0.0)

VALUES = {values: DeMo(density=0.1, chunk=8, values=values, beta=0.9) for values in ("fp32", "bf16", "sign/32:bf16")}

Run = tuple[list[list[Tensor]], list[Tensor]]


def reduced(rank: int, world_size: int) -> dict[str, Run]:
    """The gradients after each step, and the momenta after the last. `drawn`: ranks and steps have the same."""
    found = {}
    for name, method in ({"sparse": SPARSE, "exact": EXACT, "drawn": DRAWN} if world_size > 1 else VALUES).items():
        model = DistributedDataParallel(Matrices(*SHAPES))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = thinwire.compress_ddp(model, method, optimizer=optimizer, local_size=1, announce=False)
        outs = []
        for step in range(STEPS):
            model(gradients(SHAPES, 0 if name == "drawn" else rank, 0 if name == "drawn" else step)).backward()
            outs.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
        kept = handle.reduction.state.state_dict()["momentum"]
        found[name] = outs, [kept[key] for key, _ in model.module.named_parameters()]
        handle.close()
    return found


def cosines(size: int) -> Tensor:
    """Row k: sqrt(2 / size) cos(pi k (2 i + 1) / (2 size)), the first over sqrt(2)."""
    rows = [[math.cos(math.pi * k * (2 * i + 1) / (2 * size)) for i in range(size)] for k in range(size)]
    squares = torch.tensor([1 / size, *[2 / size] * (size - 1)], dtype=torch.float64)
    return torch.tensor(rows, dtype=torch.float64) * squares.sqrt()[:, None]


def largest_coefficients(x: Tensor, method: DeMo) -> Tensor:
    """What a rank sends of x, as a tensor like x: block by block, matrix by matrix."""
    out = torch.zeros_like(x)
    stack = (-1, *x.shape[-2:]) if x.dim() > 1 else (1, 1, -1)
    for whole, sent in zip(x.view(stack), out.view(stack), strict=True):
        rows, columns = (max(n for n in range(1, method.chunk + 1) if side % n == 0) for side in whole.shape)
        left, right = cosines(rows), cosines(columns)
        for i in range(0, whole.shape[0], rows):
            for j in range(0, whole.shape[1], columns):
                flat = (left @ whole[i : i + rows, j : j + columns] @ right.T).flatten()
                kept = torch.zeros_like(flat)
                largest = flat.abs().topk(math.ceil(max(method.density * flat.numel(), 1) - 1e-9)).indices
                kept[largest] = flat[largest]
                sent[i : i + rows, j : j + columns] = left.T @ kept.view(rows, columns) @ right
    return out


def by_the_algorithm(method: DeMo, num_ranks: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """The mean of what is sent, by step; and the momenta after the last, by rank."""
    momenta = [[torch.zeros(shape).double() for shape in SHAPES] for _ in range(num_ranks)]
    means = []
    for step in range(STEPS):
        sent = []
        for rank, held in enumerate(momenta):
            for momentum, grad in zip(held, gradients(SHAPES, rank, step), strict=True):
                momentum.mul_(method.beta).add_(grad)
            sent.append([largest_coefficients(momentum, method) for momentum in held])
            for momentum, part in zip(held, sent[-1], strict=True):
                momentum -= part
        means.append([torch.stack(parts).mean(0) for parts in zip(*sent, strict=True)])
    return means, momenta


def test_ranks_follow_the_algorithm() -> None:
    ranks = run_workers(reduced, 2)
    means, momenta = by_the_algorithm(SPARSE, 2)
    for found, expected in zip(ranks, momenta, strict=True):
        outs, kept = found["sparse"]
        for out, mean in ((o, m) for step in zip(outs, means, strict=True) for o, m in zip(*step, strict=True)):
            # Rounding may turn a sign where blocks nearly cancel.
            clear = mean.abs() > 1e-5
            assert torch.equal(out.double()[clear], mean.sign()[clear])
            assert float(clear.double().mean()) > 0.5
        for own, right in zip(kept, expected, strict=True):
            torch.testing.assert_close(own.double().view(right.shape), right, rtol=0, atol=1e-5)
    for step, outs in enumerate(ranks[0]["exact"][0]):
        both = [gradients(SHAPES, rank, step) for rank in range(2)]
        for out, one, other in zip(outs, *both, strict=True):
            mean = (one + other) / 2
            clear = mean.abs() > 1e-4
            assert torch.equal(out[clear], mean.sign()[clear]), "with all coefficients it is the sign of the mean"
    assert all(float(kept.abs().max()) < 1e-5 for kept in ranks[0]["exact"][1]), "all of it has been sent"
    for one, other in zip(*(found["drawn"][1] for found in ranks), strict=True):
        assert not torch.equal(one, other), "each rank rounds by draws of its own"
    first, second = ranks[0]["drawn"][0][:2]
    assert not all(map(torch.equal, first, second)), "each step draws anew"
    for outs in zip(*(found["drawn"][0] for found in ranks), strict=True):
        assert all(map(torch.equal, *outs)), "all ranks take the same step"


def test_one_rank_follows_it_and_what_it_sends_and_keeps_is_all_of_its_gradients() -> None:
    (found,) = run_workers(reduced, 1)
    means, (momenta,) = by_the_algorithm(VALUES["fp32"], 1)
    for out, mean in ((o, m) for step in zip(found["fp32"][0], means, strict=True) for o, m in zip(*step, strict=True)):
        clear = mean.abs() > 1e-5
        assert torch.equal(out.double()[clear], mean.sign()[clear])
    for own, right in zip(found["fp32"][1], momenta, strict=True):
        torch.testing.assert_close(own.double().view(right.shape), right, rtol=0, atol=1e-5)
    for values, method in VALUES.items():
        for number, (shape, kept) in enumerate(zip(SHAPES, found[values][1], strict=True)):
            held, sums = torch.zeros(shape), [torch.zeros(shape).double() for _ in range(2)]
            for step in range(STEPS):
                grad = gradients(SHAPES, 0, step)[number]
                sent = round_trip(method, method.beta * held + grad)
                held = method.beta * held + grad - sent
                sums = [method.beta * total + part for total, part in zip(sums, (sent, grad), strict=True)]
            assert float((sums[0] + kept.view(shape) - sums[1]).norm() / sums[1].norm()) < 1e-6, values
            # Blocks of the vector, of a prime length, are single elements, of which each sends all.
            assert len(shape) == 1 or float(kept.norm()) > 0.1 * float(sums[1].norm())


def round_trip(method: DeMo, x: Tensor) -> Tensor:
    """What a rank sends of x, by the codec."""
    flat = torch.empty(x.numel())
    blocks, codec = to_blocks(x, method.chunk, flat), codec_of_shape(method, x.shape)
    codec.decode(codec.encode(flat), flat.numel(), out=flat)
    return from_blocks(blocks, torch.empty(x.shape))


def test_blocks_come_back() -> None:
    for chunk, shape in (
        (64, (7, 513)), (64, (64, 128)), (64, (29,)), (64, (3, 16, 12)), (64, (4, 3, 5, 5)), (64, (0, 4)), (64, (2, 0)),
        (256, (2 * 67, 12)),
    ):  # fmt: skip
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        blocks = to_blocks(x, chunk, torch.empty(x.numel()))
        torch.testing.assert_close(from_blocks(blocks, torch.empty(shape)), x, rtol=0, atol=3e-6)
        torch.testing.assert_close(from_blocks(blocks, x.clone(), how="subtract"), 0 * x, rtol=0, atol=3e-6)
        torch.testing.assert_close(blocks.norm(), x.norm(), rtol=1e-5, atol=0)
        with without_kernels():
            torch.testing.assert_close(to_blocks(x, chunk, torch.empty(x.numel())), blocks, rtol=0, atol=3e-6)
            torch.testing.assert_close(from_blocks(blocks, torch.empty(shape)), x, rtol=0, atol=3e-6)
            torch.testing.assert_close(from_blocks(blocks, x.clone(), how="subtract"), 0 * x, rtol=0, atol=3e-6)


def test_turns_are_the_transform() -> None:
    for size in (*range(1, 65), 128, 252):
        pairs, factors, places = turns(size).arrays
        x = torch.eye(size, dtype=torch.float64).numpy()
        for pair, both in zip(pairs.reshape(-1, 2), factors.reshape(-1, 2, 2), strict=True):
            x[pair] = both.astype("float64") @ x[pair]
        torch.testing.assert_close(torch.from_numpy(x[places]), cosines(size), rtol=0, atol=2e-7)


def test_damage_fills_its_block() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    whole = from_blocks(to_blocks(x, 64, torch.empty(x.numel())), torch.empty(64, 128), how="sign")
    assert torch.equal(whole, x.sign())
    x[3, 70] = torch.nan
    blocks = to_blocks(x, 64, torch.empty(x.numel()))
    for back in (from_blocks(blocks, torch.empty(64, 128), how=how) for how in ("set", "sign")):
        assert back[:, 64:].isnan().all() and back[:, :64].isfinite().all()
    with without_kernels():
        assert from_blocks(blocks, torch.empty(64, 128), how="sign")[:, 64:].isnan().all()


def test_blocks_do_not_leave_their_matrix() -> None:
    assert block_sides(torch.Size([7, 513]), 64) == (7, 57)
    assert block_sides(torch.Size([8, 96, 40]), 64) == (48, 40), "blocks lie in one matrix of a stack"
    assert block_sides(torch.Size([96, 1, 4]), 64) == (48, 4), "a convolution is one matrix"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density 0.0 of demo: must be from 1 / chunk.2, .* nearest: 0.000244141"),
        ({"density": float("nan")}, "density nan of demo"),
        ({"density": 1.5}, "nearest: 1$"),
        ({"density": 0.001, "chunk": 8}, "nearest: 0.015625, or chunk 32$"),
        ({"chunk": 3}, "chunk 3 of demo: density 0.0078125, the default, .*; nearest: density 0.111111, or chunk 12$"),
        (
            {"chunk": 1, "density": 0.5},
            "density 0.5 of demo: must be from .* 1; nearest: 1, or chunk 2$",
        ),
        ({"chunk": 0}, "from 1 to 4096; nearest: 1, the usual: 64"),
        ({"chunk": 5000}, "nearest: 4096"),
        ({"beta": 1.0}, "below 1"),
    ],
)
def test_what_can_not_work_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeMo(**options)  # type: ignore[arg-type]


def test_plain_sgd_keeps_nothing_for_a_parameter() -> None:
    """DeMo takes no other optimizer, so `thinwire explain` counts no moments beside its momentum."""
    model = torch.nn.Linear(8, 8)
    assert thinwire.DeMo().plan(model, Topology(2, 1), 1).optimizer == 0
    assert thinwire.PowerSGD().plan(model, Topology(2, 1), 1).optimizer == 8 * 72


def test_the_transforms_are_compiled_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside islands. What a step calls is of the types that were compiled."""
    kernels = importlib.import_module("thinwire.codecs.kernels.cosines")
    called: set[tuple[object, ...]] = set()
    for name in ("forward", "backward"):
        monkeypatch.setattr(kernels, name, lambda *values, name=name: called.add((name, *map(numba.typeof, values))))
    (tmp_path / "data.txt").write_text("some words to learn\n" * 200)
    compiled = []
    for strategy, inner in (("demo", None), ("sparseloco", "demo")):
        config = TrainConfig(
            model="tiny", data=str(tmp_path / "data.txt"), cache_dir=str(tmp_path / "cache"), strategy=strategy,
            inner=inner, workers=2, local_size=1, steps=60, seq_len=16, micro_batch=2, dtype="fp32",
            run_dir=str(tmp_path / strategy),
        )  # fmt: skip
        prepare(config, Problems())
        compiled.append(set(called))
        called.clear()
    x = torch.zeros(12, 54)
    from_blocks(to_blocks(x, 64, torch.empty(x.numel())), x, how="subtract")
    assert len(called) == 2 and compiled == [called, called]
