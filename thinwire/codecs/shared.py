"""The header of packets whose receiver must draw the sender's random numbers: a seed and a counter, 8 bytes each."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.random import MASK64

HEADER_BYTES = 16


def write_header(seed: int, counter: int, packet: Tensor) -> None:
    """packet[:16] = both numbers modulo 2^64, in the machine's byte order."""
    words = [word - (word >> 63 << 64) for word in (seed & MASK64, counter & MASK64)]
    packet[:HEADER_BYTES] = torch.tensor(words, dtype=torch.int64, device=packet.device).view(torch.uint8)


def read_header(packet: Tensor) -> tuple[int, int]:
    """(seed, counter) of a packet, both in [0, 2^64)."""
    seed, counter = packet[:HEADER_BYTES].clone().view(torch.int64).tolist()
    return seed & MASK64, counter & MASK64


def check_headers(packet: Tensor, out: Tensor) -> None:
    """Raises ValueError unless both packets have one seed, counter and length."""
    if packet.shape != out.shape or not torch.equal(packet[:HEADER_BYTES], out[:HEADER_BYTES]):
        raise ValueError("packets can be added only if they were encoded with one seed, counter and length")
