"""Leaves rows of zeros out of another codec's packet: the same values in fewer bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import indices
from thinwire.codecs.base import Codec, Rotation
from thinwire.codecs.integer import Integer
from thinwire.codecs.shortened import Shortened
from thinwire.codecs.spelling import Number, spelled
from thinwire.errors import ConfigError, check_types

# Flags, rows that are there, and words of 4 bytes behind the header.
HEADER_BYTES = 12
IS_CUT, IS_MARKED = 1, 2
INT4 = Integer()


@spelled(Number("width", "rows", optional=True), wraps="coded")
@dataclass(frozen=True)
class NonzeroRows(Shortened):
    """C(x) = coded(x), its packet without the rows whose bytes are those of zeros; whole where that is not shorter.

    For tensors of which a step touches few rows, such as the gradient of an embedding. What is decoded has the bits of
    `coded`: rows are left out of its finished packet, and put back before it is unpacked.

    width: elements of a row, a multiple of the block of `coded`. coded: a codec in whose packets every block has bytes
    of its own, see `Codec.places`. Raises ConfigError otherwise.
    Packet: [flags, number of rows, words] [their ascending numbers, see `indices`] [their bytes, part by part of the
    coded packet] [what stands behind the last whole row of each part].
    """

    HEADER_BYTES = HEADER_BYTES
    coded: Codec = INT4
    width: int = 128

    def __post_init__(self) -> None:
        check_types(self)
        block = self.coded.block
        if self.coded.places(block) is None:
            raise ConfigError(f"rows around {self.coded}, whose blocks share bytes: take another codec, such as {INT4}")
        if self.width < 1 or self.width % block:
            close = max(1, round(self.width / block)) * block
            raise ConfigError(f"rows of {self.width} elements: must be a multiple of {block}; nearest is {close}")

    def bytes_of(self, num_elements: int, num_rows: int) -> int:
        """Bytes that travel of a packet of `num_elements` elements in which so many rows are there."""
        whole, of_row = num_elements // self.width, self._row_bytes
        plain = self.coded.packet_bytes(num_elements)
        here = min(num_rows, whole)
        cut = indices.layout(whole, here).num_bytes + here * of_row + plain - whole * of_row
        return HEADER_BYTES + min(_words(cut), plain)

    def length(self, packet: Tensor) -> int:
        return HEADER_BYTES + 4 * _header(packet)[2]

    def is_marked(self, packet: Tensor) -> bool:
        return bool(_header(packet)[0] & IS_MARKED)

    @property
    def rotation(self) -> Rotation | None:
        rotation = self.coded.rotation
        return rotation and rotation.around(NonzeroRows(rotation.inner, self.width))

    def backend(self, device: torch.device) -> str:
        return self.coded.backend(device)

    @property
    def _row_bytes(self) -> int:
        places = self.coded.places(self.width)
        assert places is not None
        return sum(size for _, size in places) * (self.width // self.coded.block)

    def _parts(self, plain: Tensor, num_elements: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of each part of a coded packet: its whole rows [rows, bytes], and what stands behind them."""
        places = self.coded.places(num_elements)
        assert places is not None
        num_rows, blocks = num_elements // self.width, self.width // self.coded.block
        ends = [start for start, _ in places[1:]] + [plain.numel()]
        for (start, size), end in zip(places, ends, strict=True):
            behind = start + num_rows * blocks * size
            yield plain[start:behind].view(num_rows, blocks * size), plain[behind:end]

    def shorten(self, out: Tensor, num_elements: int) -> None:
        plain = out[HEADER_BYTES:]
        flags = IS_MARKED if self.coded.marks(plain, num_elements) is not None else 0
        parts = list(self._parts(plain, num_elements))
        here = torch.zeros(num_elements // self.width, dtype=torch.bool, device=out.device)
        for (rows, _), nothing in zip(parts, _of_zeros(self, out.device), strict=True):
            here |= _differ(rows, nothing)
        numbers = here.nonzero().view(-1)
        num_bytes = plain.numel()
        if self.bytes_of(num_elements, len(numbers)) < HEADER_BYTES + num_bytes:
            stored = indices.store(numbers[None], indices.layout(len(here), len(numbers))).view(-1)
            kept = torch.cat([stored, *(rows[numbers].view(-1) for rows, _ in parts), *(rest for _, rest in parts)])
            flags, num_bytes = flags | IS_CUT, _words(len(kept))
            plain[: len(kept)] = kept
            plain[len(kept) :] = 0
        out[:HEADER_BYTES].view(torch.int32).copy_(torch.tensor([flags, len(numbers), num_bytes // 4]))

    def whole(self, packet: Tensor, num_elements: int) -> Tensor:
        flags, count, _ = _header(packet)
        num_bytes = self.coded.packet_bytes(num_elements)
        payload = packet[HEADER_BYTES : HEADER_BYTES + num_bytes]
        if not flags & IS_CUT:
            return payload
        plain = torch.empty(num_bytes, dtype=torch.uint8, device=packet.device)
        parts = list(self._parts(plain, num_elements))
        layout = indices.layout(num_elements // self.width, count)
        numbers, at = indices.load(payload[None, : layout.num_bytes], layout).view(-1), layout.num_bytes
        for (rows, _), nothing in zip(parts, _of_zeros(self, packet.device), strict=True):
            rows[:] = nothing
            size = count * rows.shape[1]
            rows[numbers] = payload[at : at + size].view(count, -1) if size else rows[:0]
            at += size
        for _, rest in parts:
            rest.copy_(payload[at : at + len(rest)])
            at += len(rest)
        return plain


@functools.lru_cache(maxsize=64)
def _of_zeros(codec: NonzeroRows, device: torch.device) -> tuple[Tensor, ...]:
    """The bytes of a row of zeros in each part of a coded packet."""
    packet = codec.coded.encode(torch.zeros(codec.width, device=device))
    return tuple(rows[0].clone() for rows, _ in codec._parts(packet, codec.width))


def _differ(rows: Tensor, nothing: Tensor) -> Tensor:
    """Which rows are not `nothing`; uint8 [rows, n] and [n] -> bool [rows]."""
    if rows.shape[1] % 4 == 0 and rows.storage_offset() % 4 == 0:
        rows, nothing = rows.view(torch.int32), nothing.view(torch.int32)
    return (rows != nothing).any(1)


def _header(packet: Tensor) -> list[int]:
    """Flags, rows that are there, words behind the header."""
    return packet[:HEADER_BYTES].view(torch.int32).tolist()


def _words(num_bytes: int) -> int:
    return -(-num_bytes // 4) * 4


def around(coded: Codec, width: int, aligned: int) -> Codec:
    """A codec for tables with rows of `width` elements, of which parts begin at multiples of `aligned` elements.

    The longest rows that both have and that are whole blocks; else blocks. The codec itself, where its blocks share
    bytes.
    """
    if coded.places(coded.block) is None:
        return coded
    common = math.gcd(width, aligned)
    return NonzeroRows(coded, coded.block if common % coded.block else common)
