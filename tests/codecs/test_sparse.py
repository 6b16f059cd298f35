"""TopK, Threshold and RandomK: what travels, in which bits, and what it costs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.conformance.codec_suite import gaussian, round_trip, same_bits
from thinwire.codecs import Cast, Codec, Identity, Integer, RandomK, Sign, Threshold, TopK, derive_seed, indices
from thinwire.codecs.random import draws, noise_keys
from thinwire.codecs.threshold import SAMPLE
from thinwire.errors import ConfigError

NUM = 1 << 18


@pytest.mark.parametrize("group", [10, 256, 4096])
@pytest.mark.parametrize("density", [0.1, 0.3, 1.0])
def test_topk_keeps_the_largest_of_each_group_exactly(group: int, density: float) -> None:
    x = gaussian(5003)
    y = round_trip(TopK(density, group, Identity()), x)
    for part, decoded in zip(x.split(group), y.split(group), strict=True):
        count = math.ceil(round(density * part.numel(), 6))
        expected = torch.zeros_like(part)
        kept = part.abs().topk(count).indices
        expected[kept] = part[kept]
        assert same_bits(decoded, expected)


def test_of_equal_elements_the_first_travel() -> None:
    x = torch.full((1000,), -0.5)
    y = round_trip(TopK(0.1, 100, Identity()), x)
    assert torch.equal(y.view(10, 100)[:, :10], torch.full((10, 10), -0.5))
    assert int((y != 0).sum()) == 100


@pytest.mark.parametrize(("density", "energy"), [(0.1, 0.439), (0.01, 0.085), (0.001, 0.0127)])
def test_energy_kept_of_gaussian_elements_is_the_published_one(density: float, energy: float) -> None:
    x = gaussian(NUM)
    for codec, slack in ((TopK(density, NUM), 0.02), (TopK(density, 1 << 16), 0.02), (Threshold(density), 0.06)):
        kept = round_trip(codec, x).square().sum() / x.square().sum()
        assert kept.item() == pytest.approx(energy, rel=slack)


def test_more_nan_than_places_stay_visible() -> None:
    x = gaussian(300)
    x[100:200] = float("nan")
    y = round_trip(TopK(0.02, 100), x)
    assert int(y.isnan().sum()) == 2
    assert bool(y[100:102].isnan().all())


@pytest.mark.parametrize("values", [Identity(), Cast("fp16"), Integer(8, 4, "nearest"), Sign(2)])
def test_values_travel_in_any_codec(values: Codec) -> None:
    codec = TopK(0.25, 64, values)
    x = gaussian(4 * codec.block)
    exact = round_trip(TopK(0.25, 64, Identity()), x)
    kept = exact != 0
    assert torch.equal(round_trip(codec, x)[kept], round_trip(values, exact[kept]))
    assert bool((round_trip(codec, x)[~kept] == 0).all())
    assert codec.bits_per_element == (16 * values.bits_per_element + 64) / 64


def test_index_layout() -> None:
    layout = indices.layout(100, 3)
    assert (layout.low, layout.upper, layout.num_bytes) == (4, 9, 3)
    stored = indices.store(torch.tensor([[2, 40, 99]]), layout)
    low, upper = 2 | (40 & 15) << 4 | (99 & 15) << 8, 1 << 0 | 1 << (2 + 1) | 1 << (6 + 2)
    assert stored.tolist() == [list((low | upper << 12).to_bytes(3, "little"))]


@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 1), (64, 64), (1000, 3), (4096, 41), (5000, 1700)])
def test_any_indices_fit_into_the_promised_bytes(size: int, count: int) -> None:
    layout = indices.layout(size, count)
    shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:count].sort().values
    spread = torch.arange(count) * size // count
    rows = torch.stack([torch.arange(count), torch.arange(size - count, size), spread, shuffled])
    assert torch.equal(indices.load(indices.store(rows, layout), layout), rows)
    codec = TopK(count / size, size, Identity())
    for row in rows:
        x = torch.zeros(size)
        x[row] = 1.0 + row
        assert torch.equal(round_trip(codec, x), x)
        assert codec.encode(x).numel() == 4 * count + -(-layout.num_bytes // 4) * 4


@pytest.mark.parametrize("density", [0.25, 0.1, 0.03, 0.01, 0.003, 0.001])
def test_index_bits_come_close_to_the_least_possible(density: float) -> None:
    size, count = 65536, indices.places(65536, density)
    ways = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)
    excess = indices.layout(size, count).num_bytes * 8 / count - ways / math.log(2) / count
    assert 0 < excess < 0.8


def dgc_choice(x: Tensor, density: float, stride: int, start: int) -> Tensor:
    """DGC's selection of one group in plain Python, ending with what fills the places left."""
    magnitudes, count = x.abs().tolist(), math.ceil(density * x.numel())
    sample = sorted(magnitudes[start::stride], reverse=True)
    bound = sample[math.ceil(density * len(sample)) - 1]
    for _ in range(10):
        if sum(m >= bound for m in magnitudes) >= 0.8 * count:
            break
        bound *= 0.8
    order = sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i] if magnitudes[i] >= bound else 0, i))
    kept = torch.tensor(sorted(order[:count]))
    return torch.zeros_like(x).index_put((kept,), x[kept])


@pytest.mark.parametrize("stride", [1, 8, 64])
def test_threshold_is_the_selection_of_dgc(stride: int) -> None:
    codec, seed, counter = Threshold(0.05, 1000, Identity(), stride=stride), 5, 7000
    x = gaussian(6000) * 10 ** gaussian(6000, seed=1)
    starts = draws(*noise_keys(derive_seed(seed, SAMPLE), 7, 6), 6) * stride >> 23
    y = codec.decode(codec.encode(x, seed=seed, counter=counter), 6000)
    for part, start, decoded in zip(x.split(1000), starts.tolist(), y.split(1000), strict=True):
        assert torch.equal(decoded, dgc_choice(part, 0.05, stride, start))


def test_threshold_ends_and_keeps_the_peak() -> None:
    sparse = torch.zeros(1 << 16)
    sparse[12345] = 3.0
    codec = Threshold(0.01)
    assert torch.equal(round_trip(codec, sparse), sparse)
    assert torch.equal(round_trip(codec, torch.zeros(1 << 16)), torch.zeros(1 << 16))
    assert int((round_trip(codec, torch.ones(1 << 16)) != 0).sum()) == codec.count


@pytest.mark.parametrize("unbiased", [True, False])
def test_randomk_sends_one_of_each_cell(unbiased: bool) -> None:
    every, x = 7, gaussian(1000)
    y = round_trip(RandomK(every, unbiased=unbiased), x)
    for part, decoded in zip(x.split(every), y.split(every), strict=True):
        (place,) = decoded.nonzero().flatten().tolist()
        assert decoded[place] == part[place] * (part.numel() if unbiased else 1)


def test_randomk_draws_evenly_and_errs_as_random_k_does() -> None:
    every, x = 16, gaussian(NUM)
    places = round_trip(RandomK(every), torch.ones(NUM)).view(-1, every).argmax(1)
    counts = torch.bincount(places, minlength=every)
    expected = NUM / every**2
    assert ((counts - expected).square() / expected).sum().item() < 45  # 15 degrees of freedom, standard deviation 5.5
    for unbiased, error in ((True, every - 1), (False, 1 - 1 / every)):
        y = round_trip(RandomK(every, unbiased=unbiased), x)
        assert ((y - x).square().sum() / x.square().sum()).item() == pytest.approx(error, rel=0.03)


def test_randomk_rounds_independently_of_what_it_draws() -> None:
    codec, x = RandomK(4, Integer(2, 1 << 16)), torch.full((1 << 18,), 0.3)
    x[0:4] = 1.0
    means = round_trip(codec, x).view(-1, 4)[1:].mean(0)  # of each place in a cell
    assert means.tolist() == pytest.approx([0.3] * 4, rel=0.07)


def test_a_damaged_cell_is_nan_whatever_was_drawn() -> None:
    x = gaussian(80)
    x[33] = float("inf")
    for seed in range(20):
        y = round_trip(RandomK(8), x, seed)
        assert bool(y[32:40].isnan().all())
        assert bool(y[:32].isfinite().all() and y[40:].isfinite().all())


def test_traits_follow_the_values() -> None:
    assert TopK().traits.contraction and not TopK().traits.unbiased
    assert not TopK(values=Cast("fp16")).traits.contraction
    assert RandomK().traits.unbiased and RandomK().traits.linear and not RandomK().traits.contraction
    assert RandomK(unbiased=False).traits.contraction and not RandomK(unbiased=False).traits.unbiased
    assert not RandomK(values=Cast()).traits.unbiased and not RandomK(values=Cast()).traits.linear


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: TopK(0.0), ("topk density 0.0", "nearest is 0.000244")),
        (lambda: TopK(1.5), ("density 1.5", "nearest is 1")),
        (lambda: TopK(0.5, 0), ("topk group 0", "nearest is 1")),
        (lambda: Threshold(stride=0), ("threshold stride 0", "nearest is 1")),
        (lambda: Threshold(0.5, 8), ("threshold stride 32", "nearest is 8")),
        (lambda: RandomK(1), ("randomk every 1", "nearest is 2")),
    ],
)
def test_bad_settings_name_the_value_and_a_valid_one(make: object, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        make()  # type: ignore[operator]
    assert all(part in str(error.value) for part in parts)


def test_wrong_buffers_are_refused() -> None:
    for codec in (TopK(0.1, 100), Threshold(0.1, 100), RandomK(4)):
        packet = codec.encode(gaussian(1000))
        with pytest.raises(ValueError, match="packet must be"):
            codec.decode(packet[:-4], 1000)
        with pytest.raises(ValueError, match="out must be"):
            codec.encode(gaussian(1000), out=torch.empty(packet.numel() + 4, dtype=torch.uint8))
