"""A Hadamard rotation around another codec: spreads an outlier over its row, so the scale fits the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs import backends
from thinwire.codecs.base import Codec, Traits
from thinwire.codecs.integer import Integer
from thinwire.codecs.spelling import Number, spelled
from thinwire.errors import ConfigError, check_types

INT4 = Integer()


@spelled(Number("block_size", "hadamard", optional=True), wraps="inner")
@dataclass(frozen=True)
class Hadamard(Codec):
    """C(x) = H^T inner(H x), H block-diagonal: Sylvester Hadamard matrices over sqrt(block_size).

    A zero between other values would come back as noise, which an optimizer such as Adam turns into a full step. So a
    group of an Integer in which a row holds zeros and other values is coded without H, C(x) = inner(x), and its scale's
    sign bit says so; that takes no byte. Rows of zeros alone are rotated to zeros.

    block_size: a power of two >= 2; a tail that is no whole row is zero-padded to one, and the packet holds
    the padding. inner: any codec without a rotation; an Integer's group must be a multiple of block_size.
    Raises ConfigError otherwise. Source: SDP4Bit (NeurIPS 2024), section 3.2.
    """

    inner: Codec = INT4
    block_size: int = 32

    def __post_init__(self) -> None:
        check_types(self)
        size = self.block_size
        if size < 2 or size & (size - 1):
            close = 2 if size < 2 else 1 << round(math.log2(size))
            raise ConfigError(f"hadamard block_size {size} is not a power of two from 2 up; nearest is {close}")
        if self.inner.rotation:
            raise ConfigError("hadamard inner is rotated already; give it the codec inside, such as Integer")
        group = self.inner.block
        if isinstance(self.inner, Integer) and group % size:
            close = max(1, round(group / size)) * size
            raise ConfigError(
                f"integer group {group} is no multiple of the hadamard block_size {size}; nearest is {close}"
            )

    @property
    def traits(self) -> Traits:
        """The inner codec's, for an orthogonal H; lossless only up to rounding, so not claimed.

        Only integers can leave a group alone; of others only whole rows of zeros are kept.
        """
        inner = self.inner.traits
        row = 1 if isinstance(self.inner, Integer) else self.block_size
        return replace(inner, lossless=False, keeps_zeros=math.lcm(inner.keeps_zeros, row))

    @property
    def block(self) -> int:
        return math.lcm(self.inner.block, self.block_size)

    @property
    def rotation(self) -> Hadamard:
        return self

    @property
    def bits_per_element(self) -> float:
        return self.inner.bits_per_element

    def packet_bytes(self, num_elements: int) -> int:
        return self.inner.packet_bytes(self._padded(num_elements))

    def places(self, num_elements: int) -> Sequence[tuple[int, int]] | None:
        inner = self.inner.places(self._padded(num_elements))
        return inner and [(start, size * (self.block // self.inner.block)) for start, size in inner]

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        if isinstance(self.inner, Integer):
            return self.inner.encode_rotated(x, rotation=self.block_size, seed=seed, counters=[counter], out=out)
        return self.inner.encode(self._rotated(x), seed=seed, counter=counter, out=out)

    def encode_rows(self, rows: Tensor, numbers: Tensor, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
        counters = backends.row_counters(numbers, rows.shape[1], self.block)
        if isinstance(self.inner, Integer):
            return self.inner.encode_rotated(rows, rotation=self.block_size, seed=seed, counters=counters, out=out)
        return self.inner.encode_rows(self._rotated(rows).view(rows.shape), numbers, seed=seed, out=out)

    def _rotated(self, x: Tensor) -> Tensor:
        """H x, flat, zero-padded to whole rows."""
        rotated = torch.zeros(self._padded(x.numel()), dtype=torch.float32, device=x.device)
        rotated[: x.numel()] = x.detach().reshape(-1)
        return self.rotate_(rotated)

    def encode_all(
        self, xs: Sequence[Tensor], outs: Sequence[Tensor], *, seed: int = 0, counters: Sequence[int]
    ) -> None:
        if isinstance(self.inner, Integer):
            self.inner.encode_all_rotated(xs, outs, rotation=self.block_size, seed=seed, counters=counters)
        else:
            super().encode_all(xs, outs, seed=seed, counters=counters)

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        padded = self._padded(num_elements)
        if out is not None and padded == num_elements:
            return self.rotate_back_(self.inner.decode(packet, padded, out=out), self.left_alone(packet, padded))
        values = self.rotate_back_(self.inner.decode(packet, padded), self.left_alone(packet, padded))[:num_elements]
        return values if out is None else out.copy_(values)

    def marks(self, packet: Tensor, num_elements: int) -> Tensor | None:
        """Which groups are not rotated, bool [groups]."""
        return self.inner.marks(packet, self._padded(num_elements))

    def packet_add(self, packet: Tensor, out: Tensor) -> Tensor:
        return self.inner.packet_add(packet, out)

    def around(self, inner: Codec) -> Hadamard:
        """The same rotation around another codec."""
        return replace(self, inner=inner)

    def rotate_(self, x: Tensor) -> Tensor:
        """x <- H x in place (H is its own inverse) for a flat contiguous fp32 x of whole rows."""
        return backends.rotate_(x, self.block_size)

    def rotate_back_(self, x: Tensor, left_alone: Tensor | None) -> Tensor:
        """Rotate all rows of `x` in place, except those of `left_alone`.

        Shape:
            x: flat fp32, of whole rows. left_alone: bool [rows], or None for no row.
        """
        if left_alone is None:
            return self.rotate_(x)
        rows = x.view(-1, self.block_size)
        rotated = rows[~left_alone]
        rows[~left_alone] = self.rotate_(rotated.view(-1)).view_as(rotated)
        return x

    def left_alone(self, packet: Tensor, num_elements: int) -> Tensor | None:
        """See Rotation; num_elements: whole rows."""
        marks = self.marks(packet, num_elements)
        if marks is None:
            return None
        return marks.repeat_interleave(self.block // self.block_size)[: num_elements // self.block_size]

    def encode_rotated(
        self, x: Tensor, left_alone: Tensor | None, *, seed: int = 0, counter: int = 0, out: Tensor
    ) -> Tensor:
        """See Rotation.

        If one row of a group is in `left_alone`, the whole group stays unrotated: its other rows are rotated back.
        """
        if left_alone is None:
            return self.inner.encode(x, seed=seed, counter=counter, out=out)
        per_group = self.block // self.block_size
        marks = torch.nn.functional.pad(left_alone, (0, -left_alone.numel() % per_group)).view(-1, per_group).any(dim=1)
        is_marked = marks.repeat_interleave(per_group)[: left_alone.numel()]
        self.rotate_back_(x, ~is_marked | left_alone)
        return self.inner.encode_marked(x, marks, seed=seed, counter=counter, out=out)

    def backend(self, device: torch.device) -> str:
        return backends.name(device)

    def _padded(self, num_elements: int) -> int:
        return -(-num_elements // self.block_size) * self.block_size
