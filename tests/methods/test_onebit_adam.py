"""1-bit Adam: its compressed all-reduce against a simulation, its two halves against Adam, when it freezes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.hosts.alone import Alone, gradients, parameters
from tests.workers import run_workers
from thinwire import ConfigError, OneBitAdam, OneBitAdamW
from thinwire.codecs import Codec, Identity
from thinwire.collectives import Topology
from thinwire.collectives.ring import ring_bytes
from thinwire.state.memory import Place

SHAPES = {"square": (16, 16), "odd": (13, 7), "bias": (5,)}
MATRICES = ("square", "odd")
FREEZE, STEPS, WORLD = 3, 9, 4


class Uncompressed(OneBitAdam):
    """C is the identity."""

    @property
    def codec(self) -> Codec:
        return Identity()


def made(method: OneBitAdam, **shapes: tuple[int, ...]) -> Alone:
    params = parameters(**(shapes or SHAPES))
    return Alone(method, params, OneBitAdamW(params.values(), lr=0.01, weight_decay=0.1, floor=0.0))


def train(rank: int, world_size: int, local_size: int) -> list[dict[str, Any]]:
    """By step: the momentum before it, what came out, the errors after it, and the weights."""
    params = parameters(**SHAPES)
    optimizer = OneBitAdamW(params.values(), lr=0.01, floor=0.0)
    alone = Alone(OneBitAdam(freeze=FREEZE, clip=0.0), params, optimizer, local_size)
    told = []
    for step in range(STEPS):
        before = {name: optimizer.state[p]["exp_avg"].clone() for name, p in params.items() if optimizer.state[p]}
        sent_before = alone.comm.meter.snapshot().sent_bytes
        outs = alone.put(gradients(params, step, rank))
        told.append(
            {
                "before": before,
                "outs": {name: out.clone() for name, out in outs.items()},
                "residual": alone.reduction.state.residuals(),
                "memory": alone.reduction.state.state_dict(),
                "weights": {name: param.detach().clone() for name, param in params.items()},
                "sent": alone.comm.meter.snapshot().sent_bytes - sent_before,
                "formula": sum(alone.reduction.sent_bytes().values()),
            }
        )
    return told


@pytest.fixture(scope="module")
def flat() -> list[list[dict[str, Any]]]:
    return run_workers(train, WORLD, 1, local_size=1)


def one_bit(x: Tensor) -> Tensor:
    """|x| / sqrt(d) sign(x), sign(0) = +1."""
    return x.norm() / x.numel() ** 0.5 * torch.where(x < 0, -1.0, 1.0)


def test_the_compressed_mean_equals_one_process_that_plays_all_ranks(flat: list[list[dict[str, Any]]]) -> None:
    """Step by step from the ranks' own momenta and errors, so that a sign that rounding flips stays in its step."""
    for step in range(FREEZE, STEPS):
        for name in MATRICES:
            num, length = torch.Size(SHAPES[name]).numel(), -(-torch.Size(SHAPES[name]).numel() // 32) * 32
            seen = torch.arange(length) < num
            sent = []
            for rank in range(WORLD):
                momentum = flat[rank][step]["before"][name].flatten()
                own = 0.9 * momentum + 0.1 * given(step, rank, name).flatten()
                y = nn.functional.pad(own, (0, length - num)) + error(flat[rank], step - 1, name, "worker", length)
                sent.append([one_bit(chunk) for chunk in y.chunk(WORLD)])
                kept = (y - torch.cat(sent[rank])) * seen
                torch.testing.assert_close(error(flat[rank], step, name, "worker", length), kept, rtol=0, atol=1e-5)
            out = flat[0][step]["outs"][name].flatten()
            for server in range(WORLD):
                own = seen.chunk(WORLD)[server]
                z = torch.stack([sent[rank][server] for rank in range(WORLD)]).mean(0) * own
                z = z + error(flat[server], step - 1, name, "server", length // WORLD)
                part = slice(server * (length // WORLD), min((server + 1) * (length // WORLD), num))
                clear = (z.abs() > 1e-5)[: part.stop - part.start]
                torch.testing.assert_close(out[part][clear], one_bit(z)[: len(clear)][clear], rtol=0, atol=1e-5)


def given(step: int, rank: int, name: str) -> Tensor:
    return gradients({key: torch.empty(shape) for key, shape in SHAPES.items()}, step, rank)[name]


def error(told: list[dict[str, Any]], step: int, name: str, kind: str, length: int) -> Tensor:
    """What a rank keeps after a step; zeros before the first compressed one."""
    return told[step]["memory"][kind].get(name, torch.zeros(length)).view(-1)


@pytest.mark.parametrize("local_size", [1, 2])
def test_momenta_that_came_out_and_errors_are_the_momenta_put_in(
    flat: list[list[dict[str, Any]]], local_size: int
) -> None:
    told = flat if local_size == 1 else run_workers(train, WORLD, local_size, local_size=local_size)
    for name in MATRICES:
        put_in, came_out = torch.zeros(SHAPES[name]), torch.zeros(SHAPES[name])
        for step in range(FREEZE, STEPS):
            mean = torch.stack([given(step, rank, name) for rank in range(WORLD)]).mean(0)
            put_in += 0.9 * told[0][step]["before"][name] + 0.1 * mean
            came_out += told[0][step]["outs"][name]
        residual = torch.stack([one[-1]["residual"][name] for one in told]).mean(0)
        assert float(residual.norm()) > 0
        torch.testing.assert_close(came_out + residual, put_in, rtol=0, atol=1e-5)
    for step in range(STEPS):
        for one in told:
            assert all(torch.equal(one[step]["weights"][name], told[0][step]["weights"][name]) for name in SHAPES)
            assert one[step]["sent"] == one[step]["formula"] or step < FREEZE


def test_exact_steps_are_those_of_adamw() -> None:
    alone, twin = made(OneBitAdam(freeze=1000, clip=0.0)), parameters(**SHAPES)
    reference = torch.optim.AdamW(twin.values(), lr=0.01, weight_decay=0.1)
    for step in range(8):
        alone.put(gradients(alone.params, step), 0.01)
        for name, grad in gradients(twin, step).items():
            twin[name].grad = grad
        reference.step()
    for name, param in alone.params.items():
        torch.testing.assert_close(param, twin[name], rtol=0, atol=1e-6)


def test_without_compression_it_is_adam_with_a_frozen_variance() -> None:
    alone, twin = made(Uncompressed(freeze=FREEZE, clip=0.0)), parameters(**SHAPES)
    m = {name: torch.zeros_like(param) for name, param in twin.items()}
    v = {name: torch.zeros_like(param) for name, param in twin.items()}
    for step in range(8):
        alone.put(gradients(alone.params, step), 0.01)
        for name, grad in gradients(twin, step).items():
            m[name] = 0.9 * m[name] + 0.1 * grad
            is_frozen = step >= FREEZE and name in MATRICES
            v[name] = v[name] if is_frozen else 0.999 * v[name] + 0.001 * grad.square()
            corrected = v[name] / (1 - 0.999 ** (FREEZE if is_frozen else step + 1))
            way = m[name] / (1 - 0.9 ** (step + 1)) / (corrected.sqrt() + 1e-8)
            twin[name].data.mul_(1 - 0.001).sub_(0.01 * way)
    for name, param in alone.params.items():
        torch.testing.assert_close(param.detach(), twin[name].detach(), rtol=0, atol=2e-6)


def test_errors_stay_bounded() -> None:
    alone = made(OneBitAdam(freeze=2, clip=0.0), matrix=(32, 32))
    for step in range(1000):
        out = alone.put(gradients(alone.params, step))["matrix"]
        if step in (100, 999):
            assert float(alone.reduction.state.residuals()["matrix"].norm()) < 5 * float(out.norm())


def test_elements_without_a_gradient_stay_where_they_are() -> None:
    alone = made(OneBitAdam(freeze=2, clip=0.0), embed=(6, 8))
    start = alone.params["embed"].detach().clone()
    for step in range(12):
        given = gradients(alone.params, step)
        given["embed"][4] = 0.0
        alone.put(given)
    decayed = start[4] * (1 - 0.1 * 0.1) ** 12
    torch.testing.assert_close(alone.params["embed"].detach()[4], decayed)
    assert float(alone.reduction.state.residuals()["embed"][4].abs().max()) == 0.0


def test_a_step_that_is_not_finite_leaves_memory_as_it_was() -> None:
    alone = made(OneBitAdam(freeze=2))
    for step in range(4):
        alone.put(gradients(alone.params, step))
    before = errors_of(alone)
    spoiled = gradients(alone.params, 4)
    spoiled["odd"][0, 0] = torch.nan
    assert not torch.isfinite(alone.put(spoiled, skip=True)["odd"]).all()
    assert alone.reduction.state.forget() == []
    after = errors_of(alone)
    assert all(torch.equal(after[kind][name], before[kind][name]) for kind in before for name in before[kind])


def errors_of(alone: Alone) -> dict[str, dict[str, Tensor]]:
    saved = alone.reduction.state.state_dict()
    return {kind: saved[kind] for kind in ("worker", "server")}


def first_frozen(alone: Alone, lrs: list[float], scale_at: Any = lambda step: 1.0) -> int | None:
    """The number of exact steps."""
    for step, lr in enumerate(lrs):
        alone.put({name: grad * scale_at(step) for name, grad in gradients(alone.params, step).items()}, lr)
        if alone.optimizer.is_frozen(alone.params["square"]):  # type: ignore[attr-defined]
            return step + 1
    return None


def with_window(method: OneBitAdam) -> Alone:
    """beta2 = 0.9: the automatic rule looks back 10 steps."""
    params = parameters(**SHAPES)
    return Alone(method, params, OneBitAdamW(params.values(), betas=(0.9, 0.9)))


def test_it_freezes_when_told_to_or_when_the_variance_has_settled() -> None:
    assert first_frozen(made(OneBitAdam(freeze=5)), [0.1] * 8) == 5
    # 10 steps and two: the fewest, as `settled_after` counts them.
    assert first_frozen(with_window(OneBitAdam()), [0.1] * 20) == 12
    # Not while the learning rate rises.
    assert first_frozen(with_window(OneBitAdam()), [0.01 * step for step in range(1, 18)] + [0.17] * 5) in (18, 19, 20)
    # Gradients that shrink by a tenth a step shrink the variance far below 0.96 of what it was.
    assert first_frozen(with_window(OneBitAdam(clip=0.0)), [0.1] * 25, lambda step: 0.9**step) is None


def rising(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = OneBitAdamW(model.parameters(), lr=1e-3)
    handle = thinwire.compress_ddp(model, OneBitAdam(freeze=3), optimizer=optimizer, announce=False)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    with pytest.raises(ConfigError) as caught:
        for _ in range(5):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    handle.close()
    return str(caught.value)


def test_a_freeze_inside_the_warm_up_is_refused() -> None:
    for said in run_workers(rising, 2):
        assert "frozen after step 3" in said and "still rises" in said
    with pytest.raises(
        ConfigError, match=r"frozen after step 12, inside the learning rate's warm-up of 40.*: 41 steps"
    ):
        OneBitAdam(freeze=0.03).for_run(400, 40)
    assert OneBitAdam().for_run(400, 40).freeze == 80
    assert OneBitAdam().for_run(400, 100).freeze == 101
    assert OneBitAdam(freeze=0.25).for_run(400, 40).settled_after == 100
    with pytest.raises(ConfigError, match=r"takes 1002 exact steps or more, and the run has 1002.*nearest: 0.2"):
        OneBitAdam(freeze=0.0).for_run(1002, 40)
    assert OneBitAdam(freeze=0.0).for_run(1003, 40).settled_after == 1002


def test_what_can_not_work_is_refused() -> None:
    for freeze in (-1.0, 1.0, 2.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"freeze .* of onebit-adam: must be a number of steps"):
            OneBitAdam(freeze=freeze)
    with pytest.raises(ConfigError, match="clip -1 of onebit-adam"):
        OneBitAdam(clip=-1)
    weights = [nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(ConfigError, match=r"was given AdamW.*thinwire.OneBitAdamW"):
        OneBitAdam().check(nn.Linear(2, 2), torch.optim.AdamW(weights))
    with pytest.raises(ConfigError, match="was given no optimizer"):
        OneBitAdam().check(nn.Linear(2, 2), None)
    with pytest.raises(ConfigError, match=r"freeze 0.2 of onebit-adam is a share of a run"):
        OneBitAdam(freeze=0.2).check(nn.Linear(2, 2), OneBitAdamW(weights))


def test_it_sends_32_times_less_than_fp32() -> None:
    shapes = {"matrix": torch.Size((1024, 1024))}
    sent = OneBitAdam().reduction(Place(shapes, Topology(WORLD, 1)), 0).sent_bytes()["inter"]
    plain = ring_bytes(4 * 1024 * 1024, Topology(WORLD, 1))["inter"]
    # 98,304 bytes of signs there and back, three scales each way, and the message for vectors with its one number.
    assert sent == 2 * 98_304 + 2 * 3 * 4 + 2 * 3 * 4
    assert plain / sent == pytest.approx(32, rel=1e-3)
