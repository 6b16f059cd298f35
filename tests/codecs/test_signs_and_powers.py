"""Sign and Natural: published errors, the packet's layout, the edges of what they claim."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.conformance.codec_suite import gaussian, round_trip, same_bits
from thinwire.codecs import Integer, Natural, Sign, reference, warm
from thinwire.errors import ConfigError

NUM = 1 << 20


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Sign(NUM), 0.603),
        (Sign(NUM, "l2"), 0.636),
        (Natural(4, NUM, "nearest"), 0.195),
        (Natural(8, NUM, "nearest"), 0.193),
    ],
    ids=str,
)
def test_error_on_gaussian_elements_is_the_published_one(codec: Sign | Natural, expected: float) -> None:
    x = gaussian(NUM)
    assert ((round_trip(codec, x) - x).norm() / x.norm()).item() == pytest.approx(expected, rel=0.02)


def test_sign_scales_and_layout() -> None:
    x = torch.tensor([3.0, -1.0, 0.0, -0.0, -2.0, 4.0, 0.0, 2.0, 1.0, -5.0])
    packet = Sign(10).encode(x)
    assert packet[:4].view(torch.float32).item() == pytest.approx(1.8)
    # Planes of width 2: bit p of byte j is the sign of element 2 p + j.
    assert packet[4:].tolist() == [0b00100, 0b10001, 0, 0]
    assert round_trip(Sign(10), x)[[2, 3]].tolist() == pytest.approx([1.8, 1.8])
    assert Sign(10, "l2").encode(x)[:4].view(torch.float32).item() == pytest.approx(math.sqrt(6.0))


def test_l2_keeps_the_norm_and_l1_is_the_best_scale() -> None:
    x = gaussian(1000)
    assert round_trip(Sign(1000, "l2"), x).norm().item() == pytest.approx(x.norm().item(), rel=1e-6)
    least = (round_trip(Sign(1000), x) - x).norm()
    signs = torch.where(x < 0, -1.0, 1.0)
    assert all(least <= (scale * x.abs().mean() * signs - x).norm() for scale in (0.9, 0.99, 1.01, 1.1))


@pytest.mark.parametrize("num_elements", [1, 2, 3, 4, 5, 127, 128, 129])
def test_sums_take_every_element_once(num_elements: int) -> None:
    x = gaussian(num_elements)
    exact = math.fsum(abs(v) for v in x.tolist()) / num_elements
    assert Sign(200).encode(x)[:4].view(torch.float32).item() == pytest.approx(exact, rel=1e-7)
    assert reference.fold(x.abs().double().view(1, -1)).item() / num_elements == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("scale", ["fp32", "bf16"])
def test_largest_and_least_floats_keep_their_scale(scale: str) -> None:
    for value in (torch.finfo(torch.float32).max, 2.0**-120, 1e-40):
        for norm in ("l1", "l2"):
            y = round_trip(Sign(64, norm, scale), torch.full((64,), -value))
            assert y.tolist() == pytest.approx([-value] * 64, rel=2**-8)


def test_l2_sign_claims_a_contraction_only_where_it_is_one() -> None:
    for group in (1, 2, 3, 4, 16):
        x = torch.eye(1, group)[0]
        codec = Sign(group, "l2")
        error = (round_trip(codec, x) - x).square().sum().item()
        assert codec.traits.contraction == (error < 1 - 1e-6)
    assert Sign(512).traits.contraction


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_powers_survive_exactly(bits: int, rounding: str) -> None:
    levels = (1 << bits - 1) - 1
    powers = 2.0 ** torch.arange(0.0, -levels, -1)
    x = torch.cat([powers, -powers, torch.zeros(1)]) * 1.5
    assert torch.equal(round_trip(Natural(bits, x.numel(), rounding), x), x)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_stochastic_goes_to_a_neighbour_with_the_right_probability(bits: int) -> None:
    levels = (1 << bits - 1) - 1
    least = 2.0 ** (1 - levels)
    draws = 4096
    for value in (0.8, 0.55, 0.3, least * 0.7, least * 0.2):
        low = 2.0 ** math.floor(math.log2(value)) if value >= least else 0.0
        high = 2 * low if low else least
        x = torch.full((draws,), -value)
        x[0] = 1.0
        y = -round_trip(Natural(bits, draws), x, seed=bits)[1:]
        assert set(y.tolist()) <= {low, high}
        share, expected = (y == high).double().mean().item(), (value - low) / (high - low)
        assert share == pytest.approx(expected, abs=5 * math.sqrt(0.25 / draws))


def test_nearest_rounds_at_the_linear_middle_and_is_idempotent() -> None:
    x = torch.tensor([1.0, 0.74, 0.76, 0.37, 0.38, 2.0**-6 * 0.51, 2.0**-6 * 0.49, -0.74])
    codec = Natural(4, 8, "nearest")
    y = round_trip(codec, x)
    assert y.tolist() == [1.0, 0.5, 1.0, 0.25, 0.5, 2.0**-6, 0.0, -0.5]
    random = round_trip(Natural(4, 128, "nearest"), gaussian(4096))
    assert same_bits(round_trip(Natural(4, 128, "nearest"), random), random)


def test_ternary_is_the_two_bit_integer() -> None:
    x = gaussian(NUM)
    errors = [((round_trip(codec, x) - x).square().mean()).item() for codec in (Natural(2), Integer(2))]
    assert errors[0] == pytest.approx(errors[1], rel=0.01)


@pytest.mark.parametrize(("bits", "edge"), [(2, 8), (3, 128)])
def test_stochastic_contraction_ends_where_claimed(bits: int, edge: int) -> None:
    assert Natural(bits, edge).traits.contraction
    assert not Natural(bits, edge + 1).traits.contraction
    assert not Natural(bits, edge, scale="bf16").traits.contraction
    least = 2.0 ** (2 - (1 << bits - 1))
    for group, contracts in ((edge, True), (2 * edge, False)):
        x = torch.full((group,), least / 4)
        x[0] = 1.0
        errors = [(round_trip(Natural(bits, group), x, seed) - x).square().sum().item() for seed in range(1500)]
        assert (sum(errors) / len(errors) < x.square().sum().item()) == contracts


def test_natural_variance_is_below_an_eighth() -> None:
    x = gaussian(NUM)
    variance = ((round_trip(Natural(8), x) - x).square().sum() / x.square().sum()).item()
    assert variance == pytest.approx(1 / 8 - 0.0477, rel=0.02)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: Sign(0), ("sign group 0", "nearest is 1")),
        (lambda: Sign(norm="L1"), ("L1", "'l1'")),
        (lambda: Sign(scale="fp16"), ("fp16", "'bf16'")),
        (lambda: Natural(5), ("natural bits 5", "nearest is")),
        (lambda: Natural(rounding="nearst"), ("nearst", "'nearest'")),
        (lambda: Natural(group=0), ("natural group 0", "nearest is 1")),
    ],
)
def test_bad_settings_name_the_value_and_a_valid_one(make: object, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        make()  # type: ignore[operator]
    assert all(part in str(error.value) for part in parts)


def test_kernels_are_compiled_without_making_a_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    zeros = torch.zeros

    def fewer_zeros(num: int, **kwargs: Any) -> torch.Tensor:
        made.append(num)
        return zeros(min(num, 64), **kwargs)

    monkeypatch.setattr(torch, "zeros", fewer_zeros)
    warm([Sign(group=1 << 30, norm="l2")])
    assert made and max(made) <= 1 << 16
