"""Entropy coding of another codec's packet: the same values in fewer bytes."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
import zstandard
from torch import Tensor

from thinwire.codecs.base import Codec, Rotation
from thinwire.codecs.integer import Integer
from thinwire.codecs.shortened import Shortened
from thinwire.codecs.spelling import Number, spelled
from thinwire.errors import ConfigError, check_types

HEADER_BYTES = 4
INT4 = Integer()
_per_thread = threading.local()


@spelled(Number("level", "zstd", optional=True), wraps="coded")
@dataclass(frozen=True)
class Zstd(Shortened):
    """C(x) = coded(x), its packet compressed without loss by Zstandard; stored as it is where that does not help.

    Codes of a quantiser are not equally frequent: a Gaussian in steps of half its deviation holds about 3 bits. The
    packet has room for the uncompressed one and 4 bytes of header, payload bytes << 2 | is_marked << 1 | is_compressed;
    only `length` bytes travel, which depends on the values. Level 1 takes the packet byte by byte through a Huffman
    code.

    coded: any codec. level: 1 (fast) to 19 (small). Raises ConfigError otherwise. Source: RFC 8878.
    """

    HEADER_BYTES = HEADER_BYTES
    coded: Codec = INT4
    level: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.level <= 19:
            raise ConfigError(f"zstd level {self.level}: must be 1 to 19; nearest is {min(max(self.level, 1), 19)}")
        if isinstance(self.coded, Zstd):
            raise ConfigError("zstd coded is compressed already; give it the codec inside")

    def length(self, packet: Tensor) -> int:
        return HEADER_BYTES + (_header(packet) >> 2)

    def is_marked(self, packet: Tensor) -> bool:
        return bool(_header(packet) & 2)

    def shorten(self, out: Tensor, num_elements: int) -> None:
        plain = out[HEADER_BYTES:]
        is_marked = self.coded.marks(plain, num_elements) is not None
        small = _compressor(self.level).compress(plain.cpu().numpy().data)
        is_smaller = len(small) < plain.numel()
        if is_smaller:
            plain[: len(small)] = torch.from_numpy(np.frombuffer(bytearray(small), dtype=np.uint8))
        num_bytes = len(small) if is_smaller else plain.numel()
        out[:HEADER_BYTES].view(torch.int32).fill_(num_bytes << 2 | is_marked << 1 | is_smaller)
        out[HEADER_BYTES + num_bytes :] = 0

    @property
    def rotation(self) -> Rotation | None:
        rotation = self.coded.rotation
        return rotation and rotation.around(Zstd(rotation.inner, self.level))

    def backend(self, device: torch.device) -> str:
        return f"{self.coded.backend(device)} + zstd"

    def whole(self, packet: Tensor, num_elements: int) -> Tensor:
        header, num_bytes = _header(packet), self.coded.packet_bytes(num_elements)
        payload = packet[HEADER_BYTES : HEADER_BYTES + (header >> 2)]
        if not header & 1:
            return payload
        plain = _decompressor().decompress(payload.cpu().numpy().data, max_output_size=num_bytes)
        return torch.frombuffer(bytearray(plain), dtype=torch.uint8).to(packet.device)


def _header(packet: Tensor) -> int:
    return int(packet[:HEADER_BYTES].view(torch.int32))


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """This thread's compressor: one must not be used by two threads at once, and making one is dear."""
    held: dict[int, zstandard.ZstdCompressor] = _per_thread.__dict__.setdefault("compressors", {})
    if level not in held:
        held[level] = zstandard.ZstdCompressor(level=level)
    return held[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    held = _per_thread.__dict__
    if "decompressor" not in held:
        held["decompressor"] = zstandard.ZstdDecompressor()
    return held["decompressor"]
