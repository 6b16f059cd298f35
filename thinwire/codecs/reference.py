"""The reference: every codec's arithmetic in plain PyTorch. The kernels give the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs.layout import LANES, Groups, group_bytes
from thinwire.codecs.random import DITHER_BITS, dithers

# Below this M/s would overflow (bits = 8) and s/M come near the denormals: such a group is zero on the wire.
TINY = 2.0**-100
# The largest finite bf16: above it M * (s/M) could overflow, so such elements are clamped, by less than 0.4%.
MAX_SCALE = torch.finfo(torch.bfloat16).max


def hadamard(x: Tensor, block_size: int) -> Tensor:
    """Each row of `block_size` elements times H/sqrt(block_size), H the Sylvester matrix; its own inverse.

    x: flat fp32, a multiple of `block_size` (a power of two). Stages of one constant pattern, (x_2j + x_2j+1)
    to the first half and (x_2j - x_2j+1) to the second, log2(block_size) times, then one multiplication by
    the scale. Source: Pease, "An adaptation of the fast Fourier transform for parallel processing" (1968).
    """
    rows = x.reshape(-1, block_size)
    for _ in range(block_size.bit_length() - 1):
        even, odd = rows[:, 0::2], rows[:, 1::2]
        rows = torch.cat([even + odd, even - odd], dim=1)
    return (rows * block_size**-0.5).reshape(-1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """int32 codes [rows, n], two's complement -> uint8 [rows, group_bytes(n)], in the planes of `layout`."""
    per_lane, _ = LANES[bits]
    padded = torch.nn.functional.pad(codes & ((1 << bits) - 1), (0, -codes.shape[1] % per_lane))
    planes = padded.unflatten(1, (per_lane, -1))
    if bits == 3:  # pairs of 3 bits are packed as the 6-bit codes below
        planes = planes[:, 0::2] | planes[:, 1::2] << 3
    if bits in (3, 6):
        spread = torch.stack([planes[:, 3] >> shift & 3 for shift in (0, 2, 4)], dim=1)
        packed = (planes[:, :3] | spread << 6).flatten(1)
    else:
        packed = sum((planes[:, p] << p * bits for p in range(1, per_lane)), planes[:, 0])
    return packed.to(torch.uint8)


def unpack(packed: Tensor, num_elements: int, bits: int) -> Tensor:
    """The inverse of `pack`: uint8 [rows, bytes] -> int32 codes [rows, num_elements]."""
    per_lane, lane_bytes = LANES[bits]
    planes = packed.to(torch.int32).unflatten(1, (lane_bytes, -1))
    if bits in (3, 6):
        fourth = sum((planes[:, k] >> 6 << 2 * k for k in range(1, 3)), planes[:, 0] >> 6)
        planes = torch.cat([planes & 63, fourth.unsqueeze(1)], dim=1)
        if bits == 3:
            planes = torch.stack([planes & 7, planes >> 3], dim=2).flatten(1, 2)
    else:
        planes = torch.cat([planes >> p * bits for p in range(per_lane)], dim=1)
    codes, half = planes.flatten(1)[:, :num_elements] & ((1 << bits) - 1), 1 << bits - 1
    return (codes ^ half) - half


def scales_of(x: Tensor, bf16: bool) -> Tensor:
    """max|x| of each row, fp32 [rows, 1]: NaN where not finite, 0 below TINY, at most MAX_SCALE.

    With `bf16` the value is rounded up to 8 significant bits, so that no code needs clamping.
    """
    peak = x.abs().amax(dim=1, keepdim=True)
    scales = peak.clamp(max=MAX_SCALE)
    if bf16:
        scales = ((scales.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    return torch.where(peak.isfinite(), torch.where(peak >= TINY, scales, 0.0), torch.nan)


def quantise(x: Tensor, dither: Tensor | None, bits: int, bf16: bool) -> tuple[Tensor, Tensor]:
    """Rows [rows, n] -> (scales fp32 [rows, 1], packed uint8 [rows, bytes]).

    s = max|x|, M = 2^(bits-1) - 1, code = clamp(round(x*(M/s)), -M, M), ties to even. With a dither u, uniform int32 in
    [0, 2^15) for stochastic rounding: floor((round(x*(2^15 M/s)) + u) / 2^15), up with the probability of the remainder
    to 15 bits. Rows with scale 0 or NaN have zero codes.
    """
    levels = (1 << bits - 1) - 1
    scales = scales_of(x, bf16)
    valid = scales > 0
    x, divisors = torch.where(valid, x, 0.0), torch.where(valid, scales, 1.0)
    if dither is None:
        codes = (x * (levels / divisors)).round().to(torch.int32)
    else:
        codes = (x * ((levels << DITHER_BITS) / divisors)).round().to(torch.int32) + dither >> DITHER_BITS
    return scales, pack(codes.clamp(-levels, levels), bits)


def dequantise(scales: Tensor, packed: Tensor, num_elements: int, bits: int) -> Tensor:
    """(scales fp32 [rows, 1], packed uint8 [rows, bytes]) -> fp32 [rows, num_elements]: code * (s/M)."""
    return unpack(packed, num_elements, bits).to(torch.float32) * (scales / ((1 << bits - 1) - 1))


def holds_zeros(x: Tensor, block_size: int) -> Tensor:
    """Which rows of `block_size` elements hold both zeros and other values: bool [rows]."""
    is_zero = x.reshape(-1, block_size) == 0
    return is_zero.any(dim=1) & ~is_zero.all(dim=1)


def encode_rows(
    x: Tensor, keys: Tensor | None, low: Tensor | None, rotation: int, bits: int, bf16: bool
) -> tuple[Tensor, Tensor]:
    """`quantise` of rows [rows, n], rotated where `rotation` > 0 divides n.

    A row in which the rotation would blur zeros is left as it is, and has a negative scale. keys, low: what
    `random.noise_keys` gives, for stochastic rounding; None for nearest.
    """
    dither = None if keys is None or low is None else dithers(keys, low, x.numel()).view(x.shape)
    if not rotation:
        return quantise(x, dither, bits, bf16)
    is_left = holds_zeros(x, rotation).view(x.shape[0], -1).any(dim=1, keepdim=True)
    rotated = hadamard(x.reshape(-1), rotation).view(x.shape)
    scales, packed = quantise(torch.where(is_left, x, rotated), dither, bits, bf16)
    return torch.where(is_left & (scales > 0), -scales, scales), packed


def encode_groups(
    quantise_rows: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    x: Tensor,
    out: Tensor,
    groups: Groups,
) -> None:
    """The packet of `layout`: whole groups as the rows of one matrix, then the tail as another of one row.

    quantise_rows: (x [rows, n], its first element's number) -> (scales fp32 [rows, 1], packed uint8 [rows, bytes]).
    """
    num = x.numel()
    end_of_scales, used, _ = groups.sections(num)
    stored = out[:end_of_scales].view(torch.int16 if groups.bf16 else torch.int32)
    whole, first_scale, first_code = num - num % groups.size, 0, end_of_scales
    for start, stop, width in ((0, whole, groups.size), (whole, num, num - whole)):
        if stop > start:
            scales, packed = quantise_rows(x[start:stop].view(-1, width), start)
            words = scales.flatten().view(torch.int32)
            stored[first_scale : first_scale + len(scales)] = words >> groups.shift
            out[first_code : first_code + packed.numel()] = packed.flatten()
            first_scale, first_code = first_scale + len(scales), first_code + packed.numel()
    out[used:] = 0


def decode_rows(out: Tensor, scales: Tensor, packed: Tensor, bits: int, add: bool) -> None:
    """`dequantise` into `out` [rows, n], or added to it; the sign of a scale is a mark."""
    store(out, dequantise(scales.abs(), packed, out.shape[1], bits), add)


def store(out: Tensor, values: Tensor, add: bool) -> None:
    """out = values, or out += values."""
    out.add_(values) if add else out.copy_(values)


def decode_groups(
    dequantise_rows: Callable[[Tensor, Tensor, Tensor], None],
    packet: Tensor,
    out: Tensor,
    groups: Groups,
) -> None:
    """The inverse of `encode_groups`. dequantise_rows: (out [rows, n], scales fp32 [rows, 1], packed [rows, bytes])."""
    num = out.numel()
    end_of_scales, used, _ = groups.sections(num)
    stored = packet[:end_of_scales].view(torch.bfloat16 if groups.bf16 else torch.float32)
    scales = stored.to(torch.float32).view(-1, 1)
    full = num // groups.size
    whole, middle = full * groups.size, end_of_scales + full * group_bytes(groups.size, groups.bits)
    if full:
        dequantise_rows(out[:whole].view(full, groups.size), scales[:full], packet[end_of_scales:middle].view(full, -1))
    if whole < num:
        dequantise_rows(out[whole:].view(1, -1), scales[full:], packet[middle:used].view(1, -1))


def fold(x: Tensor) -> Tensor:
    """Row sums of fp64 [rows, n], [rows, 1]: zero-padded to a power of two, then halves are added to halves.

    The order is part of the definition, so that a kernel can give the same bits.
    """
    width = 1 << max(x.shape[1] - 1, 0).bit_length()
    x = torch.nn.functional.pad(x, (0, width - x.shape[1]))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x


def mean_scales(x: Tensor, squared: bool, bf16: bool) -> Tensor:
    """Mean of |x| of each row, or the root of the mean square: fp32 [rows, 1], NaN where a row is not finite."""
    wide = x.to(torch.float64)
    mean = fold(wide.square() if squared else wide.abs()) / x.shape[1]
    scales = (mean.sqrt() if squared else mean).to(torch.float32)
    if bf16:
        scales = scales.clamp(max=MAX_SCALE).to(torch.bfloat16).to(torch.float32)
    return torch.where(mean.isfinite(), scales, torch.nan)


def quantise_signs(x: Tensor, squared: bool, bf16: bool) -> tuple[Tensor, Tensor]:
    """Rows [rows, n] -> (scales fp32 [rows, 1], packed uint8 [rows, bytes]): code 1 for x < 0; 0 in NaN rows."""
    scales = mean_scales(x, squared, bf16)
    return scales, pack(((x < 0) & ~scales.isnan()).to(torch.int32), 1)


def dequantise_signs(scales: Tensor, packed: Tensor, num_elements: int) -> Tensor:
    """(scales fp32 [rows, 1], packed uint8 [rows, bytes]) -> fp32 [rows, num_elements]: s, or -s for code 1."""
    return torch.where(unpack(packed, num_elements, 1) != 0, -scales, scales)


def quantise_powers(x: Tensor, random: Tensor | None, bits: int, bf16: bool) -> tuple[Tensor, Tensor]:
    """Rows [rows, n] -> (scales fp32 [rows, 1], packed uint8 [rows, bytes]): codes -M..M of `codecs.natural`.

    y = |x|/s, M = 2^(bits-1) - 1. The float y = 2^e (1 + f) goes up to 2^(e+1) with probability f, which is a carry out
    of its 23 fraction bits when r, uniform in [0, 2^23), is added to them. Below the least level l = 2^(1-M), y goes up
    to l with probability y/l, the same carry for the fixed-point fraction y/l. Nearest is r = 2^22: the middle goes up.
    """
    levels = (1 << bits - 1) - 1
    scales = scales_of(x, bf16)
    valid = scales > 0
    y = torch.where(valid, x.abs(), 0.0) * (1.0 / torch.where(valid, scales, 1.0))
    r = 1 << 22 if random is None else random.to(torch.int32)
    below = (y.clamp(max=2.0 ** (1 - levels)) * 2.0 ** (levels - 1) * 2.0**23).to(torch.int32)
    fields = y.view(torch.int32)
    codes = torch.where(fields >> 23 >= 128 - levels, (fields + r >> 23) - (127 - levels), below + r >> 23)
    codes = torch.where(valid, codes.clamp(max=levels), 0)
    return scales, pack(torch.where(x < 0, -codes, codes), bits)


def dequantise_powers(scales: Tensor, packed: Tensor, num_elements: int, bits: int) -> Tensor:
    """(scales fp32 [rows, 1], packed uint8 [rows, bytes]) -> fp32 [rows, num_elements]: +-2^(|code| - M) s, or 0."""
    codes = unpack(packed, num_elements, bits)
    size = codes.abs()
    powers = ((size + (128 - (1 << bits - 1))) << 23).view(torch.float32)
    return torch.where(size > 0, powers, 0.0) * codes.sign() * scales
