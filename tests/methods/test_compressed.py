"""PowerSGD against torch's hook, and what two-way compression promises beyond the suites."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.workers import run_workers
from thinwire.collectives import Topology
from thinwire.layout.formats import WireFormat
from thinwire.layout.sections import Sections
from thinwire.methods.ddp import DDPMethod
from thinwire.state.memory import Place

LRS = (0.1, 0.2, 0.2, 0.05)
METHOD = thinwire.TwoWay(min_bytes=0, chunk_bytes=1 << 16, threads=1)


class Matrices(nn.Module):
    """Parameters whose gradients are what forward is given; one is larger than a chunk."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.held, gradients, strict=True)]).sum()


def gradients(shapes: Sequence[tuple[int, ...]], rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def outputs(
    method: DDPMethod,
    shapes: Sequence[tuple[int, ...]],
    rank: int,
    start: dict | None = None,
    lrs: tuple[float, ...] = LRS,
) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """What a method gives back step by step, and this rank's residuals at the end."""
    model = Matrices(*shapes)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = thinwire.compress_ddp(ddp, method, optimizer=optimizer, local_size=1, seed=0, announce=False)
    if start is not None:
        handle.reduction.state.load_state_dict(start)
    given = []
    for step, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        ddp(gradients(shapes, rank, step)).backward()
        given.append([p.grad.clone() for p in model.held if p.grad is not None])
        optimizer.zero_grad()
    residual = handle.residuals() if not isinstance(method, thinwire.TorchPowerSGD) else {}
    handle.close()
    return given, residual


def stacked(rank: int) -> None:
    """A stack of experts has the factors that each of them has apart."""
    method, q = (
        thinwire.PowerSGD(rank=3, start_step=1),
        torch.randn(4, 30, 3, generator=torch.Generator().manual_seed(1)),
    )
    together, residual = outputs(method, [(4, 40, 30)], rank, {"error": {}, "q": {"held.0": q}})
    apart = {"error": {}, "q": {f"held.{number}": each for number, each in enumerate(q)}}
    each, residuals = outputs(method, [(40, 30)] * 4, rank, apart)
    for own, others in zip(together, each, strict=True):
        torch.testing.assert_close(own[0], torch.stack(others), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(residual["held.0"], torch.stack([*residuals.values()]), rtol=1e-5, atol=1e-5)


def both_powersgds(rank: int, world_size: int) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    stacked(rank)
    shapes = [(40, 30)]
    theirs, _ = outputs(thinwire.TorchPowerSGD(rank=3, start_step=2), shapes, rank, lrs=(0.1,) * 7)
    # The first Q that torch's hook draws from seed 0.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        q = torch.randn(30, 3)
    start = {"error": {}, "q": {"held.0": q}}
    ours, _ = outputs(thinwire.PowerSGD(rank=3, start_step=2), shapes, rank, start, lrs=(0.1,) * 7)
    return ours, theirs


def test_powersgd_is_that_of_torchs_hook() -> None:
    for ours, theirs in run_workers(both_powersgds, 2, local_size=1):
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own[0], other[0], rtol=1e-4, atol=1e-4)
        assert float((ours[0][0] - ours[-1][0]).abs().max()) > 0.1


def test_few_experts_travel_as_factors_of_their_own() -> None:
    method, experts = thinwire.PowerSGD(), torch.Size([8, 64, 96])
    # One matrix of 8 rows would travel whole.
    assert method.size(experts, 4) == 8 * method.size(experts[1:], 4) and method.rank_of(experts) == 4
    x = torch.randn(experts, generator=torch.Generator().manual_seed(0))
    alone = [method.errors(each, [2, 5]) for each in x]
    assert method.errors(x, [2, 5]) == pytest.approx([math.hypot(*column) for column in zip(*alone, strict=True)])
    # A convolution is one matrix, of 3 x 24 columns.
    assert method.size(torch.Size([64, 24, 3]), 4) == method.size(torch.Size([64, 72]), 4)
    place = Place({"experts": experts}, Topology(2, 1), 0)
    (row,) = [effect for what, effect, _ in method.reduction(place, 0).rows() if what == "gradients"]
    assert row.startswith("1 of 1 as factors of rank 4 in fp32 (1 of them stacks of matrices)")


def degenerate(rank: int, world_size: int) -> list[list[Tensor]]:
    """A matrix of zeros, then one of rank 1, by factors of rank 4; and factors wider than the matrix is."""
    model = Matrices((12, 40), (3, 200))
    ddp = DistributedDataParallel(model)
    method = thinwire.PowerSGD(rank=4, start_step=0, min_compression=1)
    handle = thinwire.compress_ddp(ddp, method, local_size=1, announce=False)
    thin = torch.outer(torch.arange(12.0), torch.arange(40.0)) / 100
    found = []
    for scale in (0.0, 1.0, 1.0, 1.0):
        ddp([thin * scale, gradients([(3, 200)], 0, 0)[0]]).backward()
        found.append([p.grad.clone() for p in model.held if p.grad is not None])
        model.zero_grad()
    handle.close()
    # Without an optimizer the learning rates are not known.
    unweighed = thinwire.compress_ddp(DistributedDataParallel(model), METHOD, local_size=1, announce=False)
    assert ("errors weighted by learning rates", "not weighted") in [row[:2] for row in unweighed.describe()]
    with pytest.raises(thinwire.ConfigError, match=r"does not fit: method: saved .PowerSGD\(rank=4"):
        unweighed.load_state_dict(handle.state_dict())
    unweighed.close()
    return found


def test_powersgd_divides_by_nothing() -> None:
    thin = torch.outer(torch.arange(12.0), torch.arange(40.0)) / 100
    for found in run_workers(degenerate, 2, local_size=1):
        assert not found[0][0].any()
        # The first product with Q = 0 takes some rows' span; the second step has the direction.
        torch.testing.assert_close(sum(out[0] for out in found[1:]), 3 * thin, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[0][1], gradients([(3, 200)], 0, 0)[0], rtol=1e-4, atol=1e-4)


SHAPES = [(300, 120), (64, 32), (7, 5), (33,)]


def two_way(rank: int, world_size: int) -> dict[str, tuple[list[list[Tensor]], dict[str, Tensor]]]:
    whole = replace(METHOD, chunk_bytes=1 << 22, threads=3)
    randomk = thinwire.TwoWay("randomk25%", min_bytes=0)
    methods = {"cut": METHOD, "whole": whole, "randomk": randomk}
    return {name: outputs(method, SHAPES, rank) for name, method in methods.items()}


def test_two_way() -> None:
    told = run_workers(two_way, 2, local_size=1)
    outs = told[0]["cut"][0]
    for cut, whole in zip(outs, told[0]["whole"][0], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(cut, whole, strict=True)), "chunks or threads matter"
    # sum_t lr_t out_t + lr_T residual = sum_t lr_t mean_t: errors are counted in units of the update.
    for number, shape in enumerate(SHAPES):
        means = [torch.stack([gradients(SHAPES, rank, step)[number] for rank in range(2)]).mean(0) for step in range(4)]
        put_in = sum(lr * mean for lr, mean in zip(LRS, means, strict=True))
        came_out = sum(lr * out[number] for lr, out in zip(LRS, outs, strict=True))
        residual = torch.stack([one["cut"][1][f"held.{number}"] for one in told]).mean(0)
        assert bool(residual.any()) == (len(shape) > 1)
        torch.testing.assert_close(came_out + LRS[-1] * residual, put_in, rtol=0, atol=1e-5)
    # All ranks draw the same elements: a quarter of the mean, four times as large, and nothing lost on the way back.
    first = told[0]["randomk"][0][0][0]
    mean = torch.stack([gradients(SHAPES, rank, 0)[0] for rank in range(2)]).mean(0)
    drawn = first != 0
    assert 0.2 < float(drawn.float().mean()) < 0.3
    torch.testing.assert_close(first[drawn], 4 * mean[drawn], rtol=1e-5, atol=1e-6)


def threads_that_pack(rank: int, world_size: int) -> set[str]:
    seen: set[str] = set()
    plain = thinwire.Sign.encode

    def noted(self: thinwire.Sign, x: Tensor, **options: Any) -> Tensor:
        seen.add(threading.current_thread().name.rpartition("_")[0])
        return plain(self, x, **options)

    thinwire.Sign.encode = noted  # type: ignore[method-assign]
    outputs(METHOD, SHAPES, rank)
    return seen


def test_the_communication_thread_packs_no_signs() -> None:
    assert run_workers(threads_that_pack, 2, local_size=1) == [{"thinwire-codec"}] * 2


def test_segments_are_coded_as_if_alone() -> None:
    codec, lengths, seeds = thinwire.Integer(4, 16), (32, 16, 48), (5, 6, 7)
    segments = Sections.alone(codec, lengths, seeds, is_shared=True)
    x = torch.randn(96)
    packet = segments.encode(x, seed=1, counter=2 * 96)
    assert packet.numel() == segments.packet_bytes(96)
    alone = torch.cat([
        codec.decode(codec.encode(part, seed=seed, counter=2 * length), length)
        for part, seed, length in zip(x.split(lengths), seeds, lengths, strict=True)
    ])  # fmt: skip
    assert torch.equal(segments.decode(packet, 96), alone)
    assert torch.equal(segments.decode_add(packet, torch.ones(96)), alone + 1)


def test_segments_of_neighbours_draw_opposite_noise() -> None:
    segments = Sections.alone(thinwire.Integer(4, 16), (64, 64), (5, 6))
    x = torch.rand(128) - 0.5
    one, other = (segments.decode(segments.encode(x, seed=seed), 128) for seed in (9, 9 ^ ((1 << 64) - 1)))
    assert not torch.equal(one, other)
    # Opposite noise rounds one up where it rounds the other down.
    step = x.view(-1, 16).abs().amax(1).repeat_interleave(16) / 7
    assert float(((one + other) / 2 - x).abs().max()) <= float(step.max()) / 2 * (1 + 1e-5)


def refused(rank: int, world_size: int) -> list[str]:
    model = nn.Linear(4, 4)
    found = []
    for method in (thinwire.PowerSGD(), thinwire.TwoWay(), thinwire.FSDP()):
        with pytest.raises(thinwire.ConfigError) as caught:
            thinwire.zero(model, torch.optim.SGD(model.parameters(), lr=0.1), method)  # type: ignore[arg-type]
        found.append(str(caught.value))
    return found


def test_methods_that_zero_cannot_host_are_refused_with_the_reason() -> None:
    powersgd, two_ways, fsdp = refused(0, 1)
    assert "can't run powersgd, which needs whole matrices" in powersgd and "compress_ddp" in powersgd
    assert "can't run two-way, which sends gradients back" in two_ways and "ZeroCompressed" in two_ways
    assert "compress_ddp" not in fsdp and "--strategy fsdp" in fsdp


def test_feedback_needs_a_codec_that_loses_less_than_it_sends() -> None:
    exact = thinwire.Identity()
    with pytest.raises(thinwire.ConfigError, match=r"can't have error feedback.*nearest"):
        WireFormat(exact, differences=False, intra=exact, inter=thinwire.RandomK(32), feedback=True)
    assert math.isclose(thinwire.ZeroCompressed().matrix().inter.bits_per_element, 1.0625)
