"""Sketches: the matrix they apply, their moments, and descent along what they decode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.conformance.codec_suite import gaussian, round_trip
from thinwire.codecs import CountSketch, GaussianSketch
from thinwire.codecs.normals import quantiles
from thinwire.codecs.random import draws, noise_keys
from thinwire.codecs.sketch import LinearSketch
from thinwire.errors import ConfigError

SKETCHES = [CountSketch, GaussianSketch]


def sums_of(codec: LinearSketch, x: Tensor, seed: int, counter: int = 0) -> Tensor:
    return codec.encode(x, seed=seed, counter=counter)[16:].view(torch.float32)


def count_matrix(size: int, num_buckets: int, seed: int, counter: int) -> Tensor:
    random = draws(*noise_keys(seed, counter, size), size)
    matrix = torch.zeros(num_buckets, size)
    matrix[(random >> 1) * num_buckets >> 22, torch.arange(size)] = 1.0 - 2 * (random & 1)
    return matrix


def gaussian_matrix(size: int, num_buckets: int, seed: int, columns: int) -> Tensor:
    random = draws(*noise_keys(seed, 0, 64 * columns), 64 * columns).view(64, columns)
    return quantiles()[random >> 11][:size, :num_buckets].t() / num_buckets**0.5


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("make", SKETCHES)
def test_each_group_is_multiplied_by_its_matrix(make: type[LinearSketch], unbiased: bool) -> None:
    codec, seed, counter = make(8, 64, unbiased), 3, 40
    x = gaussian(64 * 2 + 21)
    sums = sums_of(codec, x, seed, counter)
    decoded = codec.decode(codec.encode(x, seed=seed, counter=counter), x.numel())
    assert sums.numel() == 8 + 8 + 3
    for start, size, first, buckets in ((0, 64, 0, 8), (64, 64, 8, 8), (128, 21, 16, 3)):
        if make is CountSketch:
            matrix, best = count_matrix(size, buckets, seed, counter + start), buckets / (buckets + size - 1)
        else:
            matrix, best = gaussian_matrix(size, buckets, seed, 8), buckets / (buckets + size + 1)
        part = matrix @ x[start : start + size]
        torch.testing.assert_close(sums[first : first + buckets], part, rtol=1e-5, atol=1e-5)
        expected = (1.0 if unbiased else best) * (matrix.t() @ part)
        torch.testing.assert_close(decoded[start : start + size], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("make", "extra"), [(CountSketch, -1), (GaussianSketch, 1)])
def test_moments_are_the_derived_ones(make: type[LinearSketch], extra: int) -> None:
    size, ratio, num_seeds = 512, 8, 1000
    codec, x = make(ratio, size), gaussian(size)
    decoded = torch.stack([round_trip(codec, x, seed) for seed in range(num_seeds)])
    energy = x.square().sum()
    second = (decoded.square().sum(1) / energy).mean().item()
    assert second == pytest.approx(1 + (size + extra) * ratio / size, rel=0.03)
    bias = ((decoded.mean(0) - x).square().sum() / energy).sqrt().item()
    assert bias == pytest.approx((ratio / num_seeds) ** 0.5, rel=0.15)
    best = make(ratio, size, unbiased=False)
    errors = torch.stack([round_trip(best, x, seed) - x for seed in range(num_seeds)]).square().sum(1)
    assert (errors / energy).mean().item() == pytest.approx(1 - 1 / second, rel=0.03)


@pytest.mark.parametrize("make", SKETCHES)
def test_descent_along_fresh_sketches_converges_and_along_one_it_stalls(make: type[LinearSketch]) -> None:
    codec, start = make(8, 1024), gaussian(1024)
    fresh, fixed = start, start
    for step in range(100):
        fresh = fresh - round_trip(codec, fresh, step) / 9
        fixed = fixed - round_trip(codec, fixed, 0) / 30
    # A step of 1/(1 + ratio) leaves 1 - 1/9 of |w|^2 in the mean.
    assert 2e-6 < (fresh.norm() / start.norm()).square().item() < 3e-5
    assert (fixed.norm() / start.norm()).square().item() > 0.8


def test_the_quantiles_are_the_same_numbers_everywhere() -> None:
    table = quantiles().double() * 2**16
    assert torch.equal(table, table.round())
    assert torch.equal(table, -table.flip(0))
    assert (table / 2**16).square().mean().item() == pytest.approx(1, abs=1e-6)
    assert int(table.abs().sum()) == 214204152


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: CountSketch(1), ("countsketch ratio 1", "nearest is 2")),
        (lambda: CountSketch(8, 100), ("group 100", "ratio 8", "96")),
        (lambda: GaussianSketch(8, 1 << 15), ("gaussiansketch group 32768", "nearest is 4096")),
        (lambda: GaussianSketch(8, 1), ("gaussiansketch group 1", "nearest is 2")),
    ],
)
def test_bad_settings_name_the_value_and_a_valid_one(make: object, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        make()  # type: ignore[operator]
    assert all(part in str(error.value) for part in parts)
