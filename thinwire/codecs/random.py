"""Randomness as a pure function of (seed, counter): the same number on every device, at any cut."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
MASK32 = (1 << 32) - 1
GAMMA = 0x9E3779B97F4A7C15
MIX64_A, MIX64_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MIX32_A, MIX32_B = 0x85EBCA6B, 0xC2B2AE35
# Two dithers lie in the upper bits of a word's halves, moved down by one.
DITHER_BITS, PAIR_MASK = 15, 0x7FFF7FFF


def mix64(z: int) -> int:
    """A bijection of 64-bit integers that flips each output bit with probability 1/2 when an input bit flips.

    Source: the finaliser of SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators" (2014).
    """
    z = ((z ^ (z >> 30)) * MIX64_A) & MASK64
    z = ((z ^ (z >> 27)) * MIX64_B) & MASK64
    return z ^ (z >> 31)


def derive_seed(*parts: int) -> int:
    """Mix integers, such as (seed, step, rank), into one 64-bit seed; the order of the parts matters.

    h_0 = 0, h_k = mix64((h_{k-1} + gamma) xor part_k); parts are taken modulo 2^64. Result in [0, 2^64).
    """
    state = 0
    for part in parts:
        state = mix64(((state + GAMMA) ^ part) & MASK64)
    return state


def named_seed(seed: int, name: str) -> int:
    """The seed of the draws of one tensor by its name."""
    return derive_seed(seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def paired_seed(seed: int, member: int) -> int:
    """The seed of member 0, 1, 2, ...: members 2k and 2k + 1 draw opposite noise (u and 1 - u), others independent.

    A sum over members then loses half as much to stochastic rounding as with independent draws, and as little as
    with nearest rounding, yet stays unbiased: for evenly spread remainders the variance of the sum of n errors is
    n/12 + Var(sum u), in quanta squared, and Var(sum u) is 0 for pairs.
    Source: Suresh, Sun, Ro and Yu, "Correlated quantization for distributed mean estimation and optimization"
    (ICML 2022), where the draws of all members are stratified; pairs already reach the bound above.
    """
    shared = derive_seed(seed, member // 2) >> 1
    return shared ^ MASK64 if member % 2 else shared


def noise_keys(seed: int, counter: int, num_elements: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The keys and the offset that `noise` needs for elements counter .. counter + num_elements - 1.

    Row r of the int64 keys [rows, 3] is the two 32-bit halves of derive_seed(seed, (counter >> 32) + r): one
    row for each value of the upper 32 bits that occurs. A third column holds the noise's sign: seeds from 2^63 up
    draw the opposite of what their bitwise complement draws. The offset, an int64 scalar, is the lower 32 bits of
    `counter`.
    """
    high, low = (counter & MASK64) >> 32, counter & MASK32
    rows = ((low + max(num_elements, 1) - 1) >> 32) + 1
    keys = _keys(seed, [(high + row) & MASK32 for row in range(rows)])
    return keys.to(device), torch.tensor(low, device=device)


def row_keys(seed: int, counters: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The same for rows of `width` elements, those of row i numbered counters[i], counters[i] + 1, ... modulo 2^64.

    The offset is of each element, int64 [rows * width]. counters: int64 [rows].
    """
    numbers = (counters[:, None] + torch.arange(width, device=counters.device)).flatten()
    high, row = (numbers >> 32 & MASK32).unique(return_inverse=True)
    place = (row << 32 | numbers & MASK32) - torch.arange(len(numbers), device=counters.device)
    return _keys(seed, high.tolist()).to(counters.device), place


def _keys(seed: int, highs: Sequence[int]) -> Tensor:
    """The keys of `noise_keys` for some values of the upper 32 bits."""
    seed &= MASK64
    sign, seed = (-1, seed ^ MASK64) if seed >> 63 else (1, seed)
    keys = [derive_seed(seed, high) for high in highs]
    return torch.tensor([[key & MASK32, key >> 32, sign] for key in keys], dtype=torch.int64)


def draws(keys: Tensor, low: Tensor, num_elements: int) -> Tensor:
    """Uniform int64 in [0, 2^23): the upper 23 bits of the hash that `noise` scales to (2 r + 1) 2^-24 - 1/2."""
    return ((noise(keys, low, num_elements) + 0.5) * 2.0**23).to(torch.int64)


def noise(keys: Tensor, low: Tensor, num_elements: int) -> Tensor:
    """Uniform fp32 in (-1/2, 1/2), odd multiples of 2^-24: element i is a hash of the seed and counter + i.

    Only the upper 23 bits of `hash32` are used.
    """
    position = torch.arange(num_elements, dtype=torch.int64, device=keys.device) + low
    signed = (hash32(keys, position >> 32, position & MASK32) ^ 0x80000000) - 0x80000000
    return (((signed >> 8) | 1) * keys[0, 2]).to(torch.float32) * 2.0**-24


def dithers(keys: Tensor, low: Tensor, num_elements: int) -> Tensor:
    """Uniform int32 in [0, 2^15): elements with counters 2c and 2c + 1 have a hash in common, that of c.

    With h the hash and y = h xor (h >> 16): the upper 15 bits of y's lower half for the even one, and of its upper half
    for the odd one. Halves of a uniform word are independent. keys, low: of `noise_keys`; sign -1 gives 2^15 - 1 - u.
    """
    position = torch.arange(num_elements, dtype=torch.int64, device=keys.device) + low
    h = hash32(keys, position >> 32, (position & MASK32) >> 1)
    u = (h ^ (h >> 16)) >> 1 + 16 * (position & 1) & (1 << DITHER_BITS) - 1
    return torch.where(keys[0, 2] < 0, (1 << DITHER_BITS) - 1 - u, u).to(torch.int32)


def hash32(keys: Tensor, row: Tensor, x: Tensor) -> Tensor:
    """Uniform int64 in [0, 2^32) of x in [0, 2^32), int64; equal for no two x of a row of `keys`.

    x xor k0, then xor-shift and multiply twice (the multipliers of MurmurHash3's 32-bit finaliser), k1 entering between
    the multiplications; k0, k1 = keys[row].
    """
    x = x ^ keys[row, 0]
    x = ((x ^ (x >> 16)) * MIX32_A) & MASK32
    return ((x ^ (x >> 13) ^ keys[row, 1]) * MIX32_B) & MASK32


def uniform(seed: int, counter: int, num_elements: int) -> Tensor:
    """Uniform fp32 in (0, 1), shape [num_elements]; element i depends on (seed, counter + i) alone.

    Seeds and counters are 64-bit (taken modulo 2^64); a seed and its bitwise complement draw u and 1 - u. The mean is
    exactly 1/2; the step is 2^-23.
    """
    return noise(*noise_keys(seed, counter, num_elements), num_elements) + 0.5
