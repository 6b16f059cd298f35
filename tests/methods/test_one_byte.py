"""One-byte gradients: the byte, the estimate, and ranks that come late, drop out or repeat it all from the log."""

from __future__ import annotations

import copy
import io
import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.conformance.strategy_suite import Net, batch, hash_of
from tests.docs.pages import ROOT, table_rows
from tests.workers import run_workers
from thinwire import ConfigError, ForwardOptimizer, OneByte, PeerLostError, SlopeLog, forward_only
from thinwire.codecs import derive_seed
from thinwire.codecs.normals import add_normals, normals
from thinwire.methods import slope_code as byte
from thinwire.methods.directions import PIECE, Directions
from thinwire.models.llama import Llama, LlamaConfig
from thinwire.state.replicas import ReplicaError


def test_a_byte_holds_a_slope_within_its_bound() -> None:
    sizes = torch.logspace(math.log10(4e-4), math.log10(2600), 5000, dtype=torch.float64)
    slopes = torch.cat([sizes, -sizes])
    decoded = byte.decode(byte.encode(slopes))
    relative = decoded / slopes - 1
    assert 0.06 < relative.abs().max() < 0.0645 + 2**-15
    # Rounding the logarithm to nearest is biased by delta^2 / 24 only.
    assert abs(relative.mean()) < 1e-3


def test_bytes_are_ordered_stable_and_bounded() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    table = byte.decode(codes)
    assert (table[1:128].diff() > 0).all() and torch.equal(table[128:], -table[:128])
    assert byte.encode(table)[1:128].tolist() == list(range(1, 128))
    assert byte.encode(table)[129:].tolist() == list(range(129, 256))
    assert byte.decode(byte.encode(torch.tensor([1e9, -1e9], dtype=torch.float64))).abs().tolist() == [table[127]] * 2
    assert table[127] == pytest.approx(byte.MAX_SLOPE, rel=2**-15)


def test_what_is_no_slope_is_skipped() -> None:
    slopes = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 3e-4, -1e-300], dtype=torch.float64)
    assert byte.encode(slopes).tolist() == [byte.SKIP] * 7
    assert byte.decode(torch.tensor([0, 128], dtype=torch.uint8)).tolist() == [0.0, 0.0]


class Weights(nn.Module):
    """d trained numbers in two tensors, and one that is frozen."""

    def __init__(self, size: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(size // 2, generator=generator))
        self.second = nn.Parameter(torch.randn(size - size // 2, generator=generator).view(1, -1).t())
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def whole(self) -> Tensor:
        return torch.cat([self.first, self.second.flatten()])


def descent(model: nn.Module, lr: float = 1.0, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=momentum)


def test_the_estimate_is_unbiased_and_as_noisy_as_derived() -> None:
    """|g_hat - g|^2 = (d + 1)/S |g|^2 for a linear function, S samples."""
    size, samples = 60, 3000
    model = Weights(size)
    slope, before = torch.randn(size, generator=torch.Generator().manual_seed(1)), model.whole().detach()
    optimizer = forward_only(model, descent(model), OneByte(samples=samples, eps=0.01), announce=False)
    optimizer.measure(lambda: (model.whole().double() * slope).sum()).backward()
    norm = optimizer.clip_grad_norm_(math.inf)
    optimizer.step()
    estimate = before - model.whole().detach()
    error = float((estimate - slope).square().sum() / slope.square().sum())
    assert 0.6 * (size + 1) / samples < error < 1.5 * (size + 1) / samples
    assert float(norm) == pytest.approx(float(slope.norm()), rel=0.06)
    assert torch.equal(model.frozen, torch.ones(3))


@pytest.mark.parametrize("average", ["mean", "sqrt"])
def test_a_step_is_its_formula_bit_for_bit(average: str) -> None:
    """Central differences are exact on quadratics, so here the slopes are known beforehand."""
    samples, seed, eps, lr = 5, 9, 1e-2, 0.1
    model = Weights(40).double().float()
    start, target = model.whole().detach().clone(), torch.linspace(-1, 1, 40)
    optimizer = forward_only(model, descent(model, lr), OneByte(samples, eps, average), seed=seed, announce=False)
    loss = optimizer.measure(lambda: 0.5 * (model.whole() - target).double().square().sum())
    # Two micro-batches of half the weight are one.
    (loss * 0.5).backward(retain_graph=True)
    (loss * 0.5).backward()
    optimizer.step()
    expected = torch.zeros(40)
    for k in range(samples):
        z = normals(derive_seed(seed, 0, 0, k), 0, 40)
        slope = ((start - target).double() * z).sum()
        value = byte.decode(byte.encode(slope.view(1)))[0]
        expected += z * float((value * (1 / samples if average == "mean" else samples**-0.5)).float())
    reference = start.add(expected, alpha=-lr)
    assert torch.equal(model.whole().detach(), reference)
    assert float(loss.detach()) == pytest.approx(float(0.5 * (start - target).square().sum()), rel=1e-2)


def test_measuring_leaves_no_trace_in_the_weights() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 1))
    before, memory = hash_of(model), [p.data_ptr() for p in model.parameters()]
    optimizer = forward_only(model, descent(model), OneByte(samples=2, eps=1e-3), announce=False)
    for _ in range(200):
        optimizer.measure(lambda: model(torch.ones(4, 16)).mean())
    with pytest.raises(ZeroDivisionError):
        optimizer.measure(lambda: torch.tensor(1 / 0))
    assert hash_of(model) == before and [p.data_ptr() for p in model.parameters()] == memory
    assert all(p.grad is None for p in model.parameters())


def test_threads_and_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.ones(PIECE + 5), "b": torch.ones(3, 7), "c": torch.ones(2 * PIECE)}
    start = torch.cat([tensor.flatten() for tensor in weights.values()])
    expected = add_normals(0, start, torch.empty_like(start), [derive_seed(4, 2, 1, 0)], [0.25])
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with Directions(weights, 4).moved(2, (1, 0), 0.25):
            assert torch.equal(torch.cat([tensor.flatten() for tensor in weights.values()]), expected)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_both_sides_see_the_same_dropout(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is noise alone has no slope, and the next sample sees other noise, on a GPU (a stand-in) too."""
    seen: list[float] = []
    gpus = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        seen.append(float(torch.rand((), generator=gpus if on_gpu else None)))
        return torch.tensor(seen[-1])

    model = Weights(4)
    optimizer = forward_only(model, descent(model), OneByte(samples=2), announce=False)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
        patched.setattr(torch.cuda, "get_rng_state", gpus.get_state)
        patched.setattr(torch.cuda, "set_rng_state", gpus.set_state)
        loss = optimizer.measure(noise)
    loss.backward()
    assert seen[0] == seen[1] and seen[2] == seen[3] and seen[0] != seen[2]
    before = hash_of(model)
    optimizer.step()
    assert hash_of(model) == before and optimizer.skipped_steps == 1 and optimizer.log.entries[0].factor == 0.0


def test_a_skipped_step_says_what_was_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    model = Weights(4)
    optimizer = forward_only(model, descent(model), OneByte(samples=2), announce=False)
    model.whole().sum().backward()
    optimizer.step()
    assert "rank 0 measured nothing in this step: `loss = optimizer.measure(" in caplog.text
    caplog.clear()
    optimizer.measure(lambda: torch.tensor(math.nan)).backward()
    optimizer.step()
    assert "the loss is not finite, or the same on both sides" in caplog.text and "measured nothing" not in caplog.text


def steep(model: Weights) -> Tensor:
    return 30 * model.whole().double().sum()


def test_clipping_takes_the_gradients_norm_and_the_cap_each_sample() -> None:
    steps = []
    for method, max_norm in ((OneByte(4), math.inf), (OneByte(4), 2.0), (OneByte(4, cap=3.0), math.inf)):
        model = Weights(20)
        before = model.whole().detach()
        optimizer = forward_only(model, descent(model), method, announce=False)
        optimizer.measure(partial(steep, model)).backward()
        norm = float(optimizer.clip_grad_norm_(max_norm))
        optimizer.step()
        steps.append((norm, before - model.whole().detach()))
    (norm, plain), (same, clipped), (capped_norm, capped) = steps
    assert norm == same and norm > 10 and capped_norm == 3.0
    torch.testing.assert_close(clipped, plain * 2.0 / norm, rtol=1e-4, atol=1e-5)
    directions = torch.stack([normals(derive_seed(0, 0, 0, k), 0, 20) for k in range(4)])
    at_the_cap = (3.0 * directions.sum(1, keepdim=True).sign() * directions).mean(0)
    torch.testing.assert_close(capped, at_the_cap, rtol=1e-4, atol=1e-5)


METHOD = OneByte(samples=2, eps=1e-3, check_every=4)


def fresh(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(seed)
    groups = [{"params": [p]} for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(groups, lr=1e-3, momentum=0.9, weight_decay=0.01)


def advance(
    model: Net, optimizer: ForwardOptimizer, steps: range, loss_scale: Callable[[int], float] = lambda step: 1.0
) -> None:
    """Steps with a learning rate of their own each; where the loss is scaled by 0, nothing is measured."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + step)
        scale = loss_scale(step)
        if scale:
            tokens = batch(step).chunk(4)[optimizer.comm.rank]
            (optimizer.measure(partial(model, tokens, True)) * scale).backward()
        optimizer.note_loss(1.0)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def late_and_lossy(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks 0 to 2 train, while rank 2 misses step 3 and has no number in step 5; then rank 3 joins from the log."""
    founders = dist.new_group([0, 1, 2])
    model, inner = fresh()
    parcel: list[Any] = [None]
    log: SlopeLog | None = None
    if rank < 3:
        optimizer = forward_only(model, inner, METHOD, group=founders, seed=5, announce=False)
        advance(model, optimizer, range(10), lambda s: {3: 0.0, 5: math.nan}.get(s, 1.0) if rank == 2 else 1.0)
        log = optimizer.log
        optimizer.close()
        file = io.BytesIO()
        log.save(file)
        parcel = [file.getvalue()]
    dist.broadcast_object_list(parcel, 0)
    if log is None:
        log = SlopeLog.load(io.BytesIO(parcel[0]))
        log.replay(model, inner)
    caught_up = hash_of(model)
    joined = forward_only(model, inner, METHOD, log=log, announce=False)
    advance(model, joined, range(10, 14))
    again, its_inner = fresh()
    SlopeLog.from_state_dict(joined.log.state_dict()).replay(again, its_inner)
    return {
        "caught_up": caught_up,
        "start": [row[1] for row in joined.describe() if row[0] == "equal replicas at start"],
        "end": hash_of(model),
        "again": hash_of(again),
        "skips": [(entry.codes == byte.SKIP).nonzero().tolist() for entry in log.entries],
        "ranks": [len(entry.codes) for entry in log.entries],
        "parcel": len(parcel[0]),
        "steps": joined.steps,
    }


def test_a_late_rank_catches_up_from_the_log_and_a_lost_one_is_left_out() -> None:
    results = run_workers(late_and_lossy, 4)
    first = results[0]
    for result in results:
        assert result["caught_up"] == first["caught_up"] and result["start"] == ["nothing sent"]
        assert result["end"] == result["again"] == first["end"] != first["caught_up"]
        assert result["skips"] == [[[2, 0], [2, 1]] if step in (3, 5) else [] for step in range(14)]
        assert result["ranks"] == [3] * 10 + [4] * 4
        assert result["steps"] == 14


def drifting(rank: int, world_size: int) -> tuple[str, str]:
    model, inner = fresh()
    optimizer = forward_only(model, inner, METHOD, announce=False)
    advance(model, optimizer, range(2))
    if rank == 1:
        with torch.no_grad():
            model.norm.bias[3] += 1e-7
    with pytest.raises(ReplicaError) as drift:
        advance(model, optimizer, range(2, 10))
    with pytest.raises(ConfigError) as options:
        forward_only(model, inner, OneByte(samples=1 + rank), announce=False)
    return f"{optimizer.steps} {drift.value}", str(options.value)


def test_replicas_that_drift_and_ranks_that_disagree_are_named() -> None:
    for drift, options in run_workers(drifting, 2):
        assert drift == "4 after step 4 the weights of rank(s) [1] differ from rank 0's"
        assert "rank 1 has other options than rank 0" in options and "samples=" in options


def left_alone(rank: int, world_size: int, file: str) -> str:
    """Rank 1 dies after three steps that no comparison has followed; the bits that rank 0 has then."""
    model, inner = fresh()
    method = replace(METHOD, check_every=0, log=file)
    optimizer = forward_only(model, inner, method, announce=False)
    assert optimizer.catch_up() == 0
    advance(model, optimizer, range(3))
    if rank == 1:
        os._exit(0)
    with pytest.raises(PeerLostError, match="rank 1"):
        advance(model, optimizer, range(3, 5))
    return hash_of(model)


def test_the_log_of_the_survivors_holds_every_step(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "one-byte.log"
    bits, _ = run_workers(left_alone, 2, str(file), may_die=(1,))
    model, inner = fresh()
    again = forward_only(model, inner, replace(METHOD, log=str(file)), announce=False)
    assert again.catch_up() == again.steps == 3 and hash_of(model) == bits
    rows = {asked: effect for asked, effect, _ in again.describe()}
    assert rows[f"log {file}"].startswith("goes on after step 3")
    other, its_inner = fresh()
    with pytest.raises(ConfigError, match="seed: saved 0, here 8"):
        forward_only(other, its_inner, replace(METHOD, log=str(file)), seed=8, announce=False).catch_up()


def walks(step: int, stride: int) -> tuple[Tensor, Tensor]:
    """24 walks over 32 tokens by `stride`, one step in ten at random: tokens and targets, [24, 15]."""
    generator = torch.Generator().manual_seed(1000 * stride + step)
    start = torch.randint(32, (24, 1), generator=generator)
    wander = torch.rand(24, 16, generator=generator) < 0.1
    strides = torch.where(wander, torch.randint(32, (24, 16), generator=generator), stride)
    tokens = torch.cat([start, start + strides.cumsum(1)], 1) % 32
    return tokens[:, :-1], tokens[:, 1:]


def pretrained() -> Llama:
    """20,640 parameters that know walks by 1, and have seen some by 2."""
    model = Llama(LlamaConfig(32, 32, 64, 2, 2, 1, 16))
    model.init_weights(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(300):
        model(*walks(step, 2 if step % 16 == 5 else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def heldout(model: nn.Module) -> float:
    return sum(float(model(*walks(10**6 + i, 2))) for i in range(8)) / 8


def test_a_trained_model_learns_another_text_as_well_as_from_exact_slopes() -> None:
    model, samples, eps = pretrained(), 4, 1e-3
    reference = copy.deepcopy(model)
    optimizer = forward_only(model, descent(model, 4e-3), OneByte(samples=samples, eps=eps), announce=False)
    directions, exact = Directions(dict(reference.named_parameters()), 0), descent(reference, 4e-3)
    course = [heldout(model)]
    for step in range(100):
        tokens, targets = walks(step, 2)
        optimizer.measure(partial(model, tokens, targets)).backward()
        optimizer.step()
        slopes = []
        for k in range(samples):
            losses = []
            for distance in (eps, -eps):
                with torch.no_grad(), directions.moved(step, (0, k), distance):
                    losses.append(float(reference(tokens, targets)))
            slopes.append((losses[0] - losses[1]) / (2 * eps) / samples)
        with directions.gradient(step, [(0, k) for k in range(samples)], slopes):
            exact.step()
        if step % 25 == 24:
            course.append(heldout(model))
    assert course == sorted(course, reverse=True) and course[-1] < course[0] - 0.1
    assert abs(course[-1] - heldout(reference)) < 0.03


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 0}, "samples 0 of one-byte: must be at least 1; nearest: 1"),
        ({"check_every": -1}, "check_every -1 of one-byte: must be at least 0"),
        ({"eps": 0.0}, "eps 0.0 of one-byte: must be above 0"),
        ({"cap": 3000.0}, "cap 3000.0 of one-byte: .* at most 2630"),
        ({"average": "sqr"}, "'sqr' of one-byte.*did you mean 'sqrt'"),
    ],
)
def test_refused_options_say_why(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OneByte(**options)


def test_what_does_not_fit_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = forward_only(model, descent(model), OneByte(), announce=False)
    with pytest.raises(ConfigError, match=r"\(4, 2\) is not the loss itself, one number"):
        optimizer.measure(lambda: model(torch.ones(4, 3)))
    other = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match="parameters: saved"):
        optimizer.log.replay(other, descent(other))
    with pytest.raises(ConfigError, match="after 1: the log holds the steps from 0 to 0"):
        optimizer.log.replay(model, descent(model), after=1)
    with pytest.raises(ConfigError, match="cap: saved"):
        forward_only(model, descent(model), OneByte(cap=2.0), log=optimizer.log, announce=False)
    optimizer.measure(lambda: model(torch.ones(4, 3)).sum()).backward()
    optimizer.step()
    two = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match="the optimizer has 2 groups; the run's had 1"):
        optimizer.log.replay(model, two)


def test_the_start_says_what_it_is_for() -> None:
    model = nn.Linear(3, 2)
    rows = {row[0]: row for row in forward_only(model, descent(model), OneByte(samples=3), announce=False).describe()}
    assert rows["strategy one-byte"][1].startswith("3 sample(s)") and "fine-tuning" in rows["strategy one-byte"][2]
    assert rows["normal numbers per step"][1].startswith("72 ")
    assert rows["sent per rank and step"][1] == "0 bytes"


def test_every_option_is_documented() -> None:
    documented = [row[0] for row in table_rows(ROOT / "docs/methods/one-byte.md", "Options")]
    assert documented == [item.name for item in fields(OneByte)]
