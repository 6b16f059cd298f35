"""Sketches on DDP: the sum's sketch, fresh in every step; what noise promises; what a gradient tells without it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.workers import run_workers
from thinwire import ConfigError, Sketch
from thinwire.codecs import CountSketch
from thinwire.collectives import Topology
from thinwire.methods.data.sketch import SketchMean
from thinwire.methods.privacy import epsilon
from thinwire.methods.reduction import seed_of
from thinwire.state.memory import Place

SIDE, VECTOR = 32, 4000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "cuontsketch4"}, "'cuontsketch4' of Sketch.*did you mean 'countsketch4'"),
        ({"codec": "countsketch3"}, "group 4096.* ratio 3; nearest is 4095"),
        ({"codec": "int4"}, "codec 'int4' of Sketch: must be countsketch or.*nearest: 'countsketch4/4096'"),
        ({"clip": -1.0}, "clip -1.0 of sketch: must be at least 0"),
        ({"noise": math.nan}, "noise nan"),
        ({"noise": 1.0}, "noise 1.0 of sketch is a multiple of clip, which is 0"),
        ({"clip": 1.0, "codec": "countsketch4:biased"}, "leave out one of the two"),
        ({"noise_seed": 3}, "no effect without noise"),
        ({"delta": 1e-6}, "no effect without noise"),
        ({"delta": 0.0}, "delta 0.0"),
    ],
)
def test_bad_settings_name_the_value_and_a_valid_one(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sketch(**options)


class Two(nn.Module):
    """A matrix and a vector; the loss makes the gradients what is asked for, or the weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)))
        self.vector = nn.Parameter(torch.zeros(VECTOR))

    def forward(self, given: tuple[Tensor, Tensor] | None) -> Tensor:
        if given is None:
            return (self.matrix.square().sum() + self.vector.square().sum()) / 2
        return (self.matrix * given[0]).sum() + (self.vector * given[1]).sum()


def wrapped(method: Sketch) -> tuple[Two, DistributedDataParallel, thinwire.CompressedDDP]:
    model = Two()
    ddp = DistributedDataParallel(model, bucket_cap_mb=100)
    return model, ddp, thinwire.compress_ddp(ddp, method, seed=5, announce=False)


def gradient(rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(SIDE, SIDE, generator=random), torch.randn(VECTOR, generator=random)


def once(method: Sketch, given: tuple[Tensor, Tensor], steps: int = 1) -> list[tuple[Tensor, Tensor]]:
    model, ddp, handle = wrapped(method)
    outs = []
    for _ in range(steps):
        ddp(given).backward()
        assert model.matrix.grad is not None and model.vector.grad is not None
        outs.append((model.matrix.grad.clone(), model.vector.grad.clone()))
        model.zero_grad()
    handle.close()
    return outs


def sketched(rank: int, world_size: int) -> dict[str, Any]:
    told: dict[str, Any] = {"outs": once(Sketch("countsketch8"), gradient(rank), steps=2)}
    large = torch.zeros(SIDE, SIDE), torch.full((VECTOR,), 10.0 if rank == 0 else 0.0)
    told["clipped"] = once(Sketch(clip=2.0), large)[0]

    model, ddp, handle = wrapped(Sketch("countsketch8"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 9)
    told["energies"] = []
    for _ in range(101):
        told["energies"].append(float(model.matrix.square().sum()))
        ddp(None).backward()
        optimizer.step()
        optimizer.zero_grad()
    told["weights"] = model.matrix.detach().clone()
    handle.close()
    return told


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    return run_workers(sketched, 2, local_size=1)


def test_what_comes_back_is_the_decoded_sketch_of_the_mean(told: list[dict[str, Any]]) -> None:
    means = [torch.stack(parts).mean(0) for parts in zip(*map(gradient, range(2)), strict=True)]
    codec = CountSketch(8)
    for step, (matrix, vector) in enumerate(told[0]["outs"]):
        packet = codec.encode(means[0], seed=seed_of(5, step, "matrix"))
        torch.testing.assert_close(matrix.flatten(), codec.decode(packet, SIDE * SIDE), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(vector, means[1], rtol=1e-6, atol=1e-6)
        assert torch.equal(matrix, told[1]["outs"][step][0])
    assert not torch.equal(told[0]["outs"][0][0], told[0]["outs"][1][0])


def test_descent_has_the_derived_rate(told: list[dict[str, Any]]) -> None:
    """|w|^2 / 2 with a step of 1 / (1 + ratio): 1 - 1/9 of |w|^2 is left after each in the mean."""
    energies = told[0]["energies"]
    assert 2e-6 < energies[100] / energies[0] < 3e-5
    assert torch.equal(told[0]["weights"], told[1]["weights"])


def test_a_rank_is_clipped_as_one_vector(told: list[dict[str, Any]]) -> None:
    matrix, vector = told[0]["clipped"]
    assert not matrix.any()
    assert float(vector.norm()) == pytest.approx(2.0 / 2, rel=1e-5)


def noisy(rank: int, world_size: int) -> dict[str, Any]:
    nothing = torch.zeros(SIDE, SIDE), torch.zeros(VECTOR)
    seeded = Sketch(clip=2.0, noise=1.5, noise_seed=7)
    told: dict[str, Any] = {"seeded": [once(seeded, nothing, steps=2) for _ in range(2)]}
    told["secret"] = [once(Sketch(clip=2.0, noise=1.5), nothing)[0] for _ in range(2)]
    told["rows"] = wrapped(Sketch(clip=2.0, noise=1.5))[2].describe()
    return told


def test_noise_has_its_size_and_is_the_same_on_all_ranks() -> None:
    pytest.importorskip("dp_accounting")
    told = run_workers(noisy, 2, local_size=1)
    first, again = told[0]["seeded"]
    # The mean of 2 ranks: half of a sum with a standard deviation of 1.5 x 2.
    assert float(first[0][1].std()) == pytest.approx(1.5 * 2.0 / 2, rel=0.05)
    assert torch.equal(first[0][1], again[0][1]) and not torch.equal(first[0][1], first[1][1])
    assert torch.equal(first[0][0], told[1]["seeded"][0][0][0])
    one, other = told[0]["secret"]
    assert not torch.equal(one[1], other[1]) and torch.equal(one[1], told[1]["secret"][0][1])
    rows = {asked: effect for asked, effect, _ in told[0]["rows"]}
    assert rows["noise 1.5 x clip"].startswith(f"epsilon {epsilon(1.5, 100, 1e-5):.3g} after 100 steps")
    assert rows["epsilon so far, 0 steps"] == "0"


@pytest.mark.parametrize(("noise", "num_steps"), [(1.0, 1), (2.0, 10)])
def test_epsilon_is_that_of_the_steps_composed_one_by_one(noise: float, num_steps: int) -> None:
    """Their privacy losses, convolved numerically, with a bound on what that rounds away."""
    dp = pytest.importorskip("dp_accounting")
    composed = dp.pld.PLDAccountant().compose(dp.GaussianDpEvent(noise), num_steps).get_epsilon(1e-5)
    assert epsilon(noise, num_steps, 1e-5) == pytest.approx(composed, rel=0.01)


def test_epsilon_grows_with_steps_and_falls_with_noise() -> None:
    pytest.importorskip("dp_accounting")
    assert epsilon(1.0, 0, 1e-5) == 0 < epsilon(4.0, 1, 1e-5) < epsilon(4.0, 16, 1e-5) < epsilon(1.0, 10_000, 1e-5)
    # Four times the noise makes up for sixteen times the steps.
    assert epsilon(4.0, 16, 1e-5) == pytest.approx(epsilon(1.0, 1, 1e-5))


CLASSES, FEATURES, TRIALS = 10, 64, 100


def one_example(trial: int) -> tuple[Tensor, int]:
    """The gradient [classes, features] of a linear softmax model's loss on one example: (p - y) x^T; and its label."""
    random = torch.Generator().manual_seed(trial)
    weight = (0.01 * torch.randn(CLASSES, FEATURES, generator=random)).requires_grad_()
    label = int(torch.randint(CLASSES, (), generator=random))
    logits = weight @ torch.randn(FEATURES, generator=random)
    nn.functional.cross_entropy(logits[None], torch.tensor([label])).backward()
    assert weight.grad is not None
    return weight.grad, label


def guessed(sums: Tensor, packet: Tensor, codec: Any) -> int:
    """Who knows the seed decodes, and names the class whose row is the longest: |p - y| is largest at the label."""
    codec.sums(packet).copy_(sums)
    return int(codec.decode(packet, CLASSES * FEATURES).view(CLASSES, FEATURES).norm(dim=1).argmax())


def hits(method: Sketch) -> float:
    """The share of labels that are read off what one rank puts into the sum."""
    reduction, codec = SketchMean(method, Place({}, Topology(1, 1)), seed=0), method.linear
    num_hits = 0
    for trial in range(TRIALS):
        grad, label = one_example(trial)
        packet = codec.encode(grad, seed=seed_of(0, trial, "weight"))
        sums = codec.sums(packet).clone()
        reduction.protect_(sums, 0, trial)
        num_hits += guessed(sums, packet, codec) == label
    return num_hits / TRIALS


@pytest.mark.parametrize("kind", ["count", "gaussian"])
def test_a_sketch_alone_hides_no_label(kind: str) -> None:
    assert hits(Sketch(f"{kind}sketch4")) >= 0.95
    assert hits(Sketch(f"{kind}sketch4", clip=0.1)) >= 0.95


def test_noise_hides_the_label() -> None:
    pytest.importorskip("dp_accounting")
    # Of ten classes, one in ten is right by chance.
    assert hits(Sketch(clip=1.0, noise=1.0, noise_seed=1)) <= 0.3
