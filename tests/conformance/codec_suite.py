"""What every codec must prove. A new codec is one row in CASES."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from thinwire.codecs import (
    Cast,
    Codec,
    CountSketch,
    GaussianSketch,
    Hadamard,
    Identity,
    Integer,
    Natural,
    NonzeroRows,
    RandomK,
    Sign,
    Threshold,
    TopK,
    Twice,
    Zstd,
    backends,
)
from thinwire.codecs.rotated_sum import RotatedSum


@dataclass(frozen=True)
class Case:
    """A codec and the largest relative L2 error it may make on Gaussian elements."""

    codec: Codec
    error: float

    def __str__(self) -> str:
        return repr(self.codec)


CASES = [
    Case(Identity(), 0.0),
    Case(Cast("bf16"), 0.003),
    Case(Cast("fp16"), 0.0004),
    Case(Integer(2, 128, "stochastic"), 1.2),
    Case(Integer(2, 4, "nearest", "bf16"), 0.5),
    Case(Integer(2, 3), 0.54),
    Case(Integer(3, 36, "stochastic", "bf16"), 0.37),
    Case(Integer(3, 50, "nearest"), 0.27),
    Case(Integer(4, 128, "stochastic"), 0.176),
    Case(Integer(4, 128, "nearest"), 0.126),
    Case(Integer(4, 2048, "stochastic", "bf16"), 0.24),
    Case(Integer(4, 7, "nearest"), 0.09),
    Case(Integer(6, 96, "stochastic"), 0.04),
    Case(Integer(6, 33, "nearest", "bf16"), 0.03),
    Case(Integer(8, 128, "stochastic"), 0.0098),
    Case(Integer(8, 512, "nearest", "bf16"), 0.009),
    Case(Integer(8, 1), 1e-6),
    Case(Hadamard(Identity(), 64), 1e-6),
    Case(Hadamard(Cast(), 8), 0.003),
    Case(Hadamard(Integer(4, 128, "stochastic")), 0.176),
    Case(Hadamard(Integer(4, 96, "nearest", "bf16")), 0.126),
    Case(Hadamard(Integer(8, 128, "stochastic")), 0.0098),
    Case(Hadamard(Integer(3, 64, "stochastic"), 2), 0.4),
    Case(Hadamard(Integer(6, 256, "nearest"), 128), 0.05),
    Case(Zstd(Identity()), 0.0),
    Case(Zstd(Integer(4, 2048, "stochastic")), 0.24),
    Case(Zstd(Hadamard(Integer(4, 64, "stochastic", "bf16")), level=3), 0.16),
    Case(NonzeroRows(Identity(), 24), 0.0),
    Case(NonzeroRows(Cast(), 50), 0.003),
    Case(NonzeroRows(Integer(4, 64, "stochastic", "bf16"), 128), 0.16),
    Case(NonzeroRows(Hadamard(Integer(4, 64, "stochastic", "bf16")), 64), 0.16),
    Case(Sign(), 0.61),
    Case(Sign(100, "l2", "bf16"), 0.65),
    Case(Sign(3, scale="bf16"), 0.52),
    Case(Natural(8, 128, "stochastic"), 0.31),
    Case(Natural(4, 128, "nearest"), 0.2),
    Case(Natural(4, 50, "stochastic", "bf16"), 0.31),
    Case(Natural(3, 33, "stochastic"), 0.42),
    Case(Natural(2, 8, "stochastic"), 0.8),
    Case(Natural(6, 96, "nearest", "bf16"), 0.2),
    Case(Hadamard(Natural(4, 128)), 0.31),
    Case(TopK(0.01), 0.96),
    Case(TopK(0.1, 500, Identity()), 0.77),
    Case(TopK(0.3, 10, Sign(4)), 0.9),
    Case(TopK(1 / 64, 64, Integer(8, 16)), 0.96),
    Case(Threshold(0.05, 1024, stride=4), 0.86),
    Case(Threshold(0.25, 100, Identity(), stride=1), 0.55),
    Case(Twice(), 0.37),
    Case(Twice(Sign(50, scale="bf16")), 0.37),
    Case(Twice(Integer(2, 8, "stochastic")), 0.6),
    Case(TopK(1 / 64, 4096, Twice(Sign(64, scale="bf16"))), 0.97),
    Case(RandomK(4), 1.8),
    Case(RandomK(8, unbiased=False), 0.95),
    Case(RandomK(3, Integer(4, 32)), 1.55),
    Case(RandomK(2, Cast(), unbiased=False), 0.73),
    Case(CountSketch(4, 256), 2.1),
    Case(CountSketch(8, 96, unbiased=False), 0.96),
    Case(GaussianSketch(4, 128), 2.1),
    Case(GaussianSketch(8, 64, unbiased=False), 0.96),
]


def gaussian(num_elements: int, seed: int = 0) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: Codec, x: Tensor, seed: int = 0) -> Tensor:
    return codec.decode(codec.encode(x, seed=seed), x.numel())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN and the sign of zero included."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def hard_inputs(codec: Codec) -> list[Tensor]:
    """Blocks hardest for a contraction, where the codec rounds: a peak, the rest between levels."""
    rotation = codec.rotation
    inner = rotation.inner if rotation else codec
    levels = inner.levels if isinstance(inner, Integer) else 127
    if isinstance(inner, Natural):
        levels = 1 << min((1 << inner.bits - 1) - 2, 100)
    inputs = [gaussian(4 * codec.block), torch.full((codec.block,), 0.3), torch.eye(1, codec.block)[0]]
    for fraction in (0.05, 0.25, 0.5, 0.75):
        x = torch.full((codec.block,), fraction / levels)
        x[0] = 1.001
        inputs.append(rotation.rotate_(x) if rotation else x)
    return inputs


class CodecSuite:
    """Inherit, parametrise with `case`, and the codec is tested."""

    def test_its_text_reads_back(self, case: Case) -> None:
        assert Codec.parse(str(case.codec)) == case.codec

    def test_round_trip_stays_within_its_bound(self, case: Case) -> None:
        x = gaussian(40 * case.codec.block + 1000)
        error = (round_trip(case.codec, x) - x).norm() / x.norm()
        assert error <= case.error
        assert error >= case.error / 4 or case.error < 1e-5, "the bound is loose: it would not notice a defect"

    @pytest.mark.parametrize("num_elements", [0, 1, 2, 5, 31, 128, 1000, 4099])
    def test_packet_size_is_the_promise(self, case: Case, num_elements: int) -> None:
        packet = case.codec.encode(gaussian(num_elements))
        assert packet.dtype == torch.uint8
        assert packet.shape == (case.codec.packet_bytes(num_elements),)
        assert packet.numel() % 4 == 0
        assert case.codec.decode(packet, num_elements).shape == (num_elements,)

    def test_bits_per_element_is_the_size_of_a_long_packet(self, case: Case) -> None:
        num_elements = 1024 * case.codec.block
        header = case.codec.packet_bytes(0)
        size = case.codec.packet_bytes(num_elements) - header
        assert size * 8 == pytest.approx(case.codec.bits_per_element * num_elements, rel=1e-12)
        assert header <= 32

    def test_bytes_beyond_the_length_do_not_matter(self, case: Case) -> None:
        for num_elements in (0, 5, 4 * case.codec.block):
            packet = case.codec.encode(gaussian(num_elements).round(decimals=1))
            values, length = case.codec.decode(packet, num_elements), case.codec.length(packet)
            assert length == packet.numel() or (case.codec.has_variable_length and length < packet.numel())
            packet[length:] = 255
            assert same_bits(case.codec.decode(packet, num_elements), values)

    def test_lossless_keeps_every_bit(self, case: Case) -> None:
        x = torch.randint(-(2**31), 2**31, (1000,), generator=torch.Generator().manual_seed(1))
        x = x.to(torch.int32).view(torch.float32)
        assert same_bits(round_trip(case.codec, x), x) == case.codec.traits.lossless

    def test_unbiased_means_over_seeds_are_x(self, case: Case) -> None:
        x = gaussian(max(case.codec.block, 64))
        draws = torch.stack([round_trip(case.codec, x, seed) for seed in range(400)])
        noise = (draws - x).square().mean().sqrt() / 400**0.5
        bias = (draws.mean(0) - x).square().mean().sqrt()
        rounding = 1e-6 * x.abs().max()
        assert (bool(bias <= 1.5 * noise + rounding)) or not case.codec.traits.unbiased
        if case.codec.traits.unbiased and case.error > 1e-3:
            assert not torch.equal(draws[0], draws[1])

    def test_contraction_on_the_hardest_blocks(self, case: Case) -> None:
        if not case.codec.traits.contraction:
            return
        for x in hard_inputs(case.codec):
            errors = torch.stack([(round_trip(case.codec, x, seed) - x).square().sum() for seed in range(50)])
            assert errors.mean() < x.square().sum()

    @pytest.mark.parametrize("backend", ["fastest", "torch"])
    def test_zeros_stay_zeros(self, case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if backend == "torch":
            monkeypatch.setattr(backends, "cpu_kernels", lambda: None)
        codec, run = case.codec, case.codec.traits.keeps_zeros
        assert torch.equal(round_trip(codec, torch.zeros(1000)), torch.zeros(1000))
        size = 4 * codec.block + 2 * run + run // 2
        place = torch.arange(size)
        for zeros in ((place // run) % 2 == 0, (place // run) % 2 == 1, (place // run) % 16 != 3):
            for seed in range(5):
                x = gaussian(size, seed).masked_fill(zeros, 0.0)
                assert not round_trip(codec, x, seed)[zeros].any()
        if run > 1:
            leaks = [place % run != 0, gaussian(size, seed=9) > 0]
            lost = [round_trip(codec, gaussian(size).masked_fill(zeros, 0.0))[zeros].any() for zeros in leaks]
            assert any(lost), "shorter runs of zeros stay too: the trait promises less than is true"

    @pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-31, 1e-20, 1e20, 1e36])
    def test_tiny_and_huge_values_stay_in_proportion(self, case: Case, scale: float) -> None:
        x = gaussian(40 * case.codec.block + 1000).clamp(-5, 5) * scale
        y = round_trip(case.codec, x)
        if case.codec == Cast("fp16") and not 1e-6 < scale < 1e4:
            assert bool(y.isinf().any() if scale > 1 else (y == 0).all())
        else:
            assert bool(y.isfinite().all())
            error = ((y.double() - x.double()).norm() / x.double().norm()).item()
            assert error <= (max(1.0, case.error) * 1.0001 if scale < 1e-30 else 1.05 * case.error + 1e-6)

    @pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
    def test_damage_is_visible_and_stays_in_its_block(self, case: Case, poison: float) -> None:
        block = case.codec.block
        x = gaussian(4 * block)
        clean = round_trip(case.codec, x)
        x[block] = poison
        y = round_trip(case.codec, x)
        assert not y[block].isfinite()
        assert same_bits(y[:block], clean[:block])
        assert same_bits(y[2 * block :], clean[2 * block :])

    def test_any_strides_shape_and_dtype_encode_as_flat_fp32(self, case: Case) -> None:
        x = gaussian(60 * 50).view(60, 50)
        before = x.clone()
        flat = case.codec.encode(x.t().contiguous().view(-1), seed=3)
        assert torch.equal(case.codec.encode(x.t(), seed=3), flat)
        assert torch.equal(x, before)
        half = x.to(torch.bfloat16)
        assert torch.equal(case.codec.encode(half), case.codec.encode(half.to(torch.float32)))
        assert torch.equal(case.codec.encode(x.clone().requires_grad_()), case.codec.encode(x))

    def test_same_seed_and_counter_same_packet_into_any_buffer(self, case: Case) -> None:
        x = gaussian(1000)
        packet = case.codec.encode(x, seed=7, counter=11)
        dirty = torch.full((packet.numel() + 8,), 255, dtype=torch.uint8)[4:-4]
        assert case.codec.encode(x, seed=7, counter=11, out=dirty) is dirty
        assert torch.equal(dirty, packet)
        out = torch.full((1000,), float("nan"))
        assert case.codec.decode(packet, 1000, out=out) is out
        assert same_bits(out, case.codec.decode(packet, 1000))

    @pytest.mark.parametrize("counter", [0, 2**32 - 5, 2**64 - 5])
    def test_cut_at_a_block_gives_the_same_values(self, case: Case, counter: int) -> None:
        block = case.codec.block
        x = gaussian(3 * block + 5)
        whole = case.codec.decode(case.codec.encode(x, seed=5, counter=counter), x.numel())
        packets = [case.codec.encode(x[:block], seed=5, counter=counter)]
        packets.append(case.codec.encode(x[block:], seed=5, counter=counter + block))
        parts = [case.codec.decode(packets[0], block), case.codec.decode(packets[1], x.numel() - block)]
        assert same_bits(torch.cat(parts), whole)

    def test_decode_add_is_the_sum(self, case: Case) -> None:
        for num_elements in (1000, 4 * case.codec.block):
            packet, total = case.codec.encode(gaussian(num_elements)), gaussian(num_elements, seed=9)
            expected = total + case.codec.decode(packet, num_elements)
            assert case.codec.decode_add(packet, total) is total
            assert same_bits(total, expected)

    def test_a_sum_of_packets_is_taken_in_their_order(self, case: Case) -> None:
        for num_elements in (0, 1, 1000, 4 * case.codec.block):
            packets = [case.codec.encode(gaussian(num_elements, seed), seed=seed) for seed in range(3)]
            values = [case.codec.decode(packet, num_elements) for packet in packets]
            total = torch.full((num_elements,), float("nan"))
            assert case.codec.decode_sum(packets, total) is total
            assert same_bits(total, values[0] + values[1] + values[2])
            total = gaussian(num_elements, seed=9)
            expected = total + values[0] + values[1] + values[2]
            assert same_bits(case.codec.decode_sum(packets, total, add=True), expected)

    def test_several_at_once_are_as_each_alone(self, case: Case) -> None:
        codec, counters = case.codec, [2**32 - 5 * case.codec.block, 0, 7 * case.codec.block]
        for num_elements in (0, 1000, 2 * codec.block):
            xs = [gaussian(num_elements, seed) for seed in range(3)]
            packets = [torch.full((codec.packet_bytes(num_elements),), 255, dtype=torch.uint8) for _ in xs]
            codec.encode_all(xs, packets, seed=3, counters=counters)
            for x, counter, packet in zip(xs, counters, packets, strict=True):
                assert torch.equal(packet, codec.encode(x, seed=3, counter=counter))
            values = [codec.decode(packet, num_elements) for packet in packets]
            for add in (False, True):
                outs = [x.clone() for x in xs]
                codec.decode_all(packets, outs, add=add)
                for x, own, out in zip(xs, values, outs, strict=True):
                    assert same_bits(out, x + own if add else own)

    @pytest.mark.parametrize("backend", ["fastest", "torch"])
    def test_rows_draw_by_their_numbers(self, case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        codec, width = case.codec, 3 * case.codec.block
        inner = getattr(codec, "inner", getattr(codec, "repeated", codec))
        if codec.traits.draws and not isinstance(inner, (Integer, Natural)):
            return
        # The middle of the second row has the number 2^32, of the third one 2^63.
        numbers = torch.tensor([7, 2**32 // width, 2**63 // width, 0, 7])
        rows = gaussian(5 * width).view(5, width)
        alone = [codec.encode(row, seed=3, counter=int(n) * width) for n, row in zip(numbers, rows, strict=True)]
        expected = torch.cat([codec.decode(packet, width) for packet in alone])
        if backend == "torch":
            monkeypatch.setattr(backends, "cpu_kernels", lambda: None)
        assert same_bits(codec.decode(codec.encode_rows(rows, numbers, seed=3), rows.numel()), expected)
        assert torch.equal(codec.encode_rows(rows[:0], numbers[:0]), codec.encode(rows[:0]))
        if codec.traits.draws and codec.block > 1:
            with pytest.raises(ValueError, match="no whole blocks"):
                codec.encode_rows(rows[:, 1:], numbers)

    def test_what_draws_says_so(self, case: Case) -> None:
        x = gaussian(max(1000, 4 * case.codec.block))
        if case.error > 1e-3:
            assert same_bits(round_trip(case.codec, x, 1), round_trip(case.codec, x, 2)) != case.codec.traits.draws

    def test_sums_commute_with_the_rotation(self, case: Case) -> None:
        codec, rotation, size = case.codec, case.codec.rotation, 4 * case.codec.block
        if rotation is None:
            return
        packets = [codec.encode(gaussian(size, seed)) for seed in range(3)]
        rotated, expected = torch.zeros(size), torch.zeros(size)
        for packet in packets:
            rotation.inner.decode_add(packet, rotated)
            codec.decode_add(packet, expected)
        assert torch.allclose(rotation.rotate_(rotated.clone()), expected, atol=1e-5)
        assert rotation.inner.rotation is None
        total = RotatedSum.of(codec, packets, torch.empty(size))
        assert total.left_alone is None and torch.equal(total.values, rotated)

    @pytest.mark.parametrize("density", [0.02, 0.5, 0.98])
    def test_a_sum_is_zero_where_every_packet_was(self, case: Case, density: float) -> None:
        codec, size = case.codec, 6 * case.codec.block
        if codec.rotation is None:
            return
        # Zeros that all have, zeros of one alone, and rows and groups of zeros; of the second hop too.
        together = torch.rand(size, generator=torch.Generator().manual_seed(9)) < density
        together[: codec.block + codec.rotation.block_size] = True
        inputs = [gaussian(size, seed).masked_fill(together, 0.0) for seed in range(3)]
        inputs[0][3 * codec.block : 5 * codec.block] = 0.0
        inputs[1].masked_fill_(gaussian(size, seed=7) > 1.5, 0.0)
        packets = [codec.encode(x, seed=1) for x in inputs]
        expected = torch.stack([codec.decode(packet, size) for packet in packets]).sum(dim=0)
        total = RotatedSum.of(codec, packets, torch.empty(size)).rotated_back()
        assert torch.allclose(total, expected, atol=1e-5)
        again = RotatedSum.of(codec, packets, torch.empty(size))
        packet = torch.empty(codec.packet_bytes(size), dtype=torch.uint8)
        RotatedSum.encode_all([again], codec, seed=5, counters=[0], outs=[packet])
        second = RotatedSum.of(codec, [packet, packet], torch.empty(size)).rotated_back()
        if codec.traits.keeps_zeros == 1:
            assert not total[together].any() and not second[together].any()
        lost = (second / 2 - total).norm()
        assert lost <= (3 * case.error + 1e-6) * total.norm(), "the second hop packs another sum"

    def test_packets_add_up_where_the_codec_is_linear(self, case: Case) -> None:
        codec, size = case.codec, 3 * case.codec.block + 5
        packets = [codec.encode(gaussian(size, seed), seed=3, counter=7) for seed in range(3)]
        if not codec.traits.linear:
            with pytest.raises(ValueError, match="can't be added"):
                codec.packet_add(packets[1], packets[0])
            return
        expected = sum((codec.decode(packet, size) for packet in packets), torch.zeros(size))
        for packet in packets[1:]:
            assert codec.packet_add(packet, packets[0]) is packets[0]
        assert torch.allclose(codec.decode(packets[0], size), expected, atol=1e-4)
        if codec.packet_bytes(0):
            with pytest.raises(ValueError, match="one seed"):
                codec.packet_add(codec.encode(gaussian(size), seed=4, counter=7), packets[0])

    @pytest.mark.parametrize("num_elements", [0, 1, 33, 1000, 5003])
    def test_backend_equals_the_reference_bit_for_bit(
        self, case: Case, num_elements: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x = gaussian(num_elements) * 10 ** gaussian(num_elements, seed=1)
        if num_elements > 900:
            x[300], x[500:700], x[700:800] = float("nan"), 0.0, 1e-36
        seed, counter = 2**63 + 5, 2**32 - 500

        def each_way() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            packet = case.codec.encode(x, seed=seed, counter=counter)
            total = case.codec.decode_sum([packet, packet, packet], torch.empty(num_elements))
            return packet, case.codec.decode(packet, num_elements), case.codec.decode_add(packet, x.clone()), total

        fast = each_way()
        monkeypatch.setattr(backends, "cpu_kernels", lambda: None)
        plain = each_way()
        assert torch.equal(fast[0], plain[0])
        assert same_bits(fast[1], plain[1])
        assert same_bits(fast[2], plain[2])
        assert same_bits(fast[3], plain[3])
