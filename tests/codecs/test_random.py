"""The counter-based hash: uniform, independent of neighbours, seeds and of where a tensor is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.codecs import Integer, derive_seed, paired_seed
from thinwire.codecs.random import uniform

NUM = 1 << 18


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a, b]).double())[0, 1].item()


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 1])
def test_uniform_fills_the_unit_interval_evenly(seed: int) -> None:
    u = uniform(seed, 0, NUM)
    assert u.dtype == torch.float32
    assert 0 < u.min() < 1e-4
    assert 1 > u.max() > 1 - 1e-4
    counts = torch.histc(u, bins=256, min=0, max=1)
    chi_squared = ((counts - NUM / 256).square() / (NUM / 256)).sum().item()
    assert 150 < chi_squared < 380  # 255 degrees of freedom: mean 255, standard deviation 22.6
    assert abs(u.double().mean().item() - 0.5) < 5 * (1 / 12 / NUM) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 32, 128, 2048, 65536])
def test_neighbours_are_uncorrelated(lag: int) -> None:
    u = uniform(5, 0, NUM)
    assert abs(correlation(u[:-lag], u[lag:])) < 5 / NUM**0.5


@pytest.mark.parametrize("other", [1, 2, 1 << 31, 1 << 32, 1 << 63])
def test_near_seeds_are_uncorrelated(other: int) -> None:
    assert abs(correlation(uniform(0, 0, NUM), uniform(other, 0, NUM))) < 5 / NUM**0.5


def test_a_pair_of_seeds_draws_opposite_noise() -> None:
    even, odd = (uniform(paired_seed(7, member), 5, NUM) for member in (2, 3))
    torch.testing.assert_close(even + odd, torch.ones(NUM), rtol=0, atol=1e-6)
    assert abs(correlation(even, uniform(paired_seed(7, 4), 5, NUM))) < 5 / NUM**0.5


def test_pairs_halve_the_error_of_a_sum() -> None:
    inputs = torch.randn(4, NUM, generator=torch.Generator().manual_seed(0))
    codec = Integer(bits=4, group=128)

    def error(seeds: list[int]) -> float:
        decoded = sum(codec.decode(codec.encode(x, seed=s), NUM) for x, s in zip(inputs, seeds, strict=True))
        return float((decoded - inputs.sum(0)).square().mean())

    paired = error([paired_seed(1, member) for member in range(4)])
    independent = error([derive_seed(1, member) for member in range(4)])
    assert 0.45 < paired / independent < 0.55


def test_every_bit_of_the_counter_matters() -> None:
    far = [uniform(0, 1 << bit, 4096) for bit in (20, 31, 32, 40, 63)]
    for k, u in enumerate(far):
        assert all(abs(correlation(u, v)) < 5 / 4096**0.5 for v in far[:k])


@pytest.mark.parametrize("start", [0, 2**32 - 100, 2**64 - 100])
def test_element_depends_on_seed_and_counter_alone(start: int) -> None:
    whole = uniform(3, start, 300)
    parts = [uniform(3, start, 150), uniform(3, start + 150, 150)]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.unique().numel() > 298


def test_derive_seed_depends_on_every_part_and_on_the_order() -> None:
    seeds = {derive_seed(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert derive_seed(0) != derive_seed(0, 0)
    assert derive_seed(2**64 + 5) == derive_seed(5)
    assert derive_seed(-1) == derive_seed(2**64 - 1)


def test_derive_seed_flips_half_of_the_bits() -> None:
    flips = [(derive_seed(7, 1 << bit) ^ derive_seed(7, 0)).bit_count() for bit in range(64)]
    assert 28 < sum(flips) / 64 < 36
    assert min(flips) > 15
