"""What only integers and rotations promise: published errors, the packet's layout, the edges of the range."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.conformance.codec_suite import gaussian, round_trip, same_bits
from thinwire.codecs import Cast, Codec, Hadamard, Identity, Integer, Natural, backends, reference
from thinwire.errors import ConfigError

CPU = torch.device("cpu")
NUM = 1 << 20


def relative_error(codec: Codec, x: Tensor) -> float:
    return ((round_trip(codec, x) - x).norm() / x.norm()).item()


def heavy_tailed() -> Tensor:
    """Student-t with 3 degrees of freedom."""
    chi_squared = torch.stack([gaussian(NUM, seed) for seed in (1, 2, 3)]).square().sum(0)
    return gaussian(NUM) / (chi_squared / 3).sqrt()


def with_outliers() -> Tensor:
    x = gaussian(NUM)
    x[torch.rand(NUM, generator=torch.Generator().manual_seed(4)) < 0.005] *= 50
    return x


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Integer(4, 128, "stochastic"), 0.166),
        (Integer(4, 128, "nearest"), 0.117),
        (Integer(8, 128, "stochastic"), 0.0092),
    ],
    ids=str,
)
def test_error_on_gaussian_elements_is_the_published_one(codec: Codec, expected: float) -> None:
    assert relative_error(codec, gaussian(NUM)) == pytest.approx(expected, rel=0.02)


def test_rotation_tames_heavy_tails() -> None:
    # Figures of an independent float64 quantiser in NumPy: 0.330 and 0.165 for the heavy tails.
    for x, plain, rotated in ((heavy_tailed(), 0.330, 0.165), (with_outliers(), 0.390, 0.134)):
        assert relative_error(Integer(), x) == pytest.approx(plain, rel=0.03)
        assert relative_error(Hadamard(Integer()), x) == pytest.approx(rotated, rel=0.03)


def test_mean_of_many_draws_comes_close_to_x() -> None:
    x = gaussian(1024)
    mean = torch.stack([round_trip(Integer(), x, seed) for seed in range(2000)]).mean(0)
    assert ((mean - x).norm() / x.norm()).item() == pytest.approx(0.0037, rel=0.15)


def test_packet_layout() -> None:
    x = torch.tensor([7.0, 1.0, -2.0, 3.0, -4.0, 14.0])
    packet = Integer(4, 4, "nearest").encode(x)
    assert packet[:8].view(torch.float32).tolist() == [7.0, 14.0]
    assert packet[8:].tolist() == [0xE7, 0x31, 0x7E, 0]  # first half | second half << 4, two's complement
    packet = Integer(3, 8, "nearest", "bf16").encode(torch.tensor([3.0, -3, 1, 2, 0, -1, 3, -2]))
    planes = [3, 5, 1, 2, 0, 7, 3, 6]
    fourth = planes[6] | planes[7] << 3
    expected = [planes[2 * k] | planes[2 * k + 1] << 3 | (fourth >> 2 * k & 3) << 6 for k in range(3)]
    assert packet[:2].view(torch.bfloat16).item() == 3.0
    assert packet[2:].tolist() == [*expected, 0, 0, 0]


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_levels_survive_exactly(bits: int) -> None:
    levels = (1 << bits - 1) - 1
    x = torch.arange(-levels, levels + 1).float().repeat(5)
    for rounding in ("nearest", "stochastic"):
        decoded = round_trip(Integer(bits, x.numel(), rounding), x)
        assert torch.allclose(decoded, x, rtol=1e-6, atol=0)


def test_bf16_scale_never_clamps() -> None:
    x = gaussian(128 * 200)
    scales = reference.scales_of(x.view(-1, 128), bf16=True)
    peaks = x.view(-1, 128).abs().amax(1, keepdim=True)
    assert bool((scales >= peaks).all())
    assert bool((scales <= peaks * (1 + 2**-7)).all())
    assert torch.equal(scales.to(torch.bfloat16).float(), scales)


@pytest.mark.parametrize("scale", ["fp32", "bf16"])
def test_edges_of_the_range(scale: str) -> None:
    codec = Integer(8, 4, "nearest", scale)
    largest, tiny = torch.finfo(torch.float32).max, 2.0**-100
    x = torch.tensor([largest, 0, 0, -largest, tiny / 2, -tiny / 2, 1e-45, 0, tiny, -tiny, 0, 0])
    y = round_trip(codec, x)
    assert y[:4].tolist() == pytest.approx(x[:4].tolist(), rel=2**-8)
    assert y[4:8].tolist() == [0, 0, 0, 0]
    assert y[8:].tolist() == pytest.approx(x[8:].tolist(), rel=2**-7)


def test_a_poisoned_group_is_nan_as_a_whole() -> None:
    x = gaussian(128 * 3)
    x[200] = float("inf")
    for codec in (Integer(), Integer(scale="bf16"), Integer(3), Hadamard(Integer())):
        y = round_trip(codec, x)
        assert bool(y[128:256].isnan().all())
        assert bool(y[:128].isfinite().all() and y[256:].isfinite().all())


def test_traits() -> None:
    assert Integer(4, 2048, "nearest").traits.contraction
    assert not Integer(4, 2048, "nearest").traits.unbiased
    assert Integer(4, 4 * 49).traits.contraction
    assert not Integer(4, 4 * 49 + 1).traits.contraction
    assert not Integer(4, 4 * 49, scale="bf16").traits.contraction
    assert Hadamard(Integer(4, 192)).traits == Integer(4, 192).traits
    assert Hadamard(Natural(4, 48)).traits == replace(Natural(4, 48).traits, keeps_zeros=32)
    assert not Hadamard(Identity()).traits.lossless
    assert not Cast("fp16").traits.contraction


def test_no_contraction_is_claimed_where_there_is_a_counterexample() -> None:
    codec = Integer(2, 16, "stochastic")
    x = torch.full((16,), 0.5)
    x[0] = 1.0
    x[1:] = 0.4
    errors = torch.stack([(round_trip(codec, x, seed) - x).square().sum() for seed in range(200)])
    assert not codec.traits.contraction
    assert errors.mean() > x.square().sum()


@pytest.mark.parametrize("block_size", [2, 4, 8, 16, 32, 64, 256])
def test_rotation_is_the_orthonormal_sylvester_matrix(block_size: int) -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < block_size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    for rows in (1, 3, 4, 9):
        x = gaussian(rows * block_size)
        expected = (x.view(rows, -1) @ matrix / block_size**0.5).view(-1)
        rotated = Hadamard(Identity(), block_size).rotate_(x.clone())
        assert torch.allclose(rotated, expected, atol=1e-6)
        assert same_bits(rotated, reference.hadamard(x, block_size))


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: Integer(5), ("5", "nearest is")),
        (lambda: Integer(4, 0), ("group 0", "1")),
        (lambda: Integer(rounding="nearst"), ("nearst", "'nearest'")),
        (lambda: Integer(scale="fp16"), ("fp16", "'bf16'")),
        (lambda: Cast("bf17"), ("bf17", "'bf16'")),
        (lambda: Hadamard(Integer(4, 100)), ("100", "32", "96")),
        (lambda: Hadamard(Integer(4, 8)), ("8", "32")),
        (lambda: Hadamard(Identity(), 24), ("24", "power of two", "32")),
        (lambda: Hadamard(Hadamard(Integer())), ("rotated already",)),
    ],
)
def test_bad_settings_name_the_value_and_a_valid_one(make: object, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        make()  # type: ignore[operator]
    assert all(part in str(error.value) for part in parts)


def test_wrong_buffers_are_refused() -> None:
    codec, x = Integer(), gaussian(1000)
    packet = codec.encode(x)
    with pytest.raises(ValueError, match="out must be"):
        codec.encode(x, out=torch.empty(packet.numel() - 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="packet must be"):
        codec.decode(packet[:-4], 1000)
    with pytest.raises(ValueError, match="packet must be"):
        codec.decode_sum([packet, packet[:-4]], torch.empty(1000))
    with pytest.raises(ValueError, match="out must be"):
        codec.decode_all([packet, packet], [torch.empty(1000), torch.empty(999)])
    with pytest.raises(ValueError, match="x must be"):
        codec.encode_all([x, x[:999]], [packet, packet], counters=[0, 0])
    with pytest.raises(ValueError, match="out must be"):
        codec.decode(packet, 1000, out=torch.empty(2000)[::2])
    with pytest.raises(ValueError, match="x must be"):
        Hadamard(codec).rotate_(torch.empty(33))


def test_backend_names_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Integer().backend(CPU) == Hadamard(Integer()).backend(CPU) == "numba"
    assert Integer().backend(torch.device("cuda")) == "torch.compile"
    assert Cast().backend(CPU) == Identity().backend(CPU) == "torch"
    backends.cpu_kernels.cache_clear()
    backends._import.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "thinwire.codecs.kernels.common", None)
    with pytest.warns(UserWarning, match="plain torch"):
        assert Integer().backend(CPU) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert relative_error(Integer(), gaussian(1000)) < 0.2
    backends.cpu_kernels.cache_clear()
