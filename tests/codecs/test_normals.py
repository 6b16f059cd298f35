"""Normal numbers of a counter: their moments, their independence, and one result for every way to compute them."""

from __future__ import annotations

import pytest
import torch

from thinwire.codecs import backends
from thinwire.codecs.normals import BLOCK, add_normals, normals, quantiles

NUM = 1 << 18
SEEDS, SCALES = [5, 2**63 + 7, 11], [0.5, -1e-3, 3.0]


def test_moments_are_those_of_the_normal_distribution() -> None:
    z = normals(3, 0, NUM).double()
    for power, moment, spread in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 2.97, 96.0)):
        assert abs(z.pow(power).mean().item() - moment) < 5 * (spread / NUM) ** 0.5
    below = [(z < bound).double().mean().item() for bound in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    expected = torch.special.ndtr(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(torch.tensor(below, dtype=torch.float64), expected, rtol=0, atol=5 * 0.5 / NUM**0.5)
    assert quantiles().double().square().mean().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("seed", "counter"), [(4, 0), (3, 1), (3, NUM), (3, 1 << 32)])
def test_other_seeds_and_counters_draw_other_numbers(seed: int, counter: int) -> None:
    pair = torch.stack([normals(3, 0, NUM), normals(seed, counter, NUM)]).double()
    assert abs(torch.corrcoef(pair)[0, 1].item()) < 5 / NUM**0.5


@pytest.mark.parametrize("counter", [0, (1 << 32) - 3000])
def test_the_kernel_gives_the_bits_of_the_plain_version(counter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.randn(2 * BLOCK + 33, generator=torch.Generator().manual_seed(0))
    fast = add_normals(counter, base, torch.empty_like(base), SEEDS, SCALES)
    monkeypatch.setattr(backends, "numba_module", lambda family, device: None)
    plain = add_normals(counter, base, torch.empty_like(base), SEEDS, SCALES)
    assert torch.equal(fast, plain)
    in_place = base.clone()
    assert add_normals(counter, in_place, in_place, SEEDS, SCALES) is in_place and torch.equal(in_place, plain)


def test_a_cut_changes_nothing() -> None:
    base = torch.randn(BLOCK + 9, generator=torch.Generator().manual_seed(0))
    whole = add_normals(70, base, torch.empty_like(base), SEEDS, SCALES)
    parts = [add_normals(70 + a, base[a:b], torch.empty(b - a), SEEDS, SCALES) for a, b in ((0, 7), (7, BLOCK + 9))]
    assert torch.equal(whole, torch.cat(parts))
    assert add_normals(0, base[:0], torch.empty(0), SEEDS, SCALES).numel() == 0
    assert torch.equal(add_normals(0, base, torch.empty_like(base), [], []), base)
