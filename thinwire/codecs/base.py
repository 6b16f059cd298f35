"""A codec turns a tensor into the packet that travels, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire.codecs import grammar
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Traits:
    """What a codec C promises about its result.

    lossless: C(x) = x, bit for bit, for fp32 input.
    unbiased: E[C(x)] = x over the random seed.
    contraction: E|C(x) - x|^2 <= (1 - delta) |x|^2 over the random seed, for some delta > 0 and every x.
    linear: packets of one (seed, counter) can be added with `packet_add`, and the sum decodes to the sum of what they
    decode to, up to fp32 rounding; so a sum may travel where otherwise each of its parts must.
    draws: what is lost depends on the seed and the counter.
    keeps_zeros: runs of this many elements that are exactly zero, and start at a multiple of it (or are the tail),
    decode to exact zeros, if no element of their block is NaN or inf. 1: every zero element; 0: no promise.
    """

    lossless: bool = False
    unbiased: bool = False
    contraction: bool = False
    linear: bool = False
    draws: bool = False
    keeps_zeros: int = 0


class Codec(ABC):
    """Tensor -> packet -> tensor, for flat fp32 tensors; a packet is a flat uint8 tensor.

    Every codec is a frozen dataclass and a pure function of (x, seed, counter): element i of `x` draws its
    randomness from (seed, counter + i), or from the number of its group, (counter + i) // group, so a tensor cut in
    two and encoded piece by piece at a multiple of `block` gives the same values as the whole.
    """

    @staticmethod
    def parse(text: str) -> Codec:
        """The codec that a text such as "int4/64:bf16+hadamard32" stands for; `str` writes it back. See `grammar`.

        Raises ConfigError that names the text, what in it can't be read, and the nearest that can.
        """
        try:
            return grammar.read(text)
        except ConfigError as error:
            raise ConfigError(f"codec {text!r}: {error}") from None

    def __str__(self) -> str:
        return grammar.write(self)

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """The promises this codec keeps."""

    @property
    def block(self) -> int:
        """Elements that share side information; cut a tensor only at multiples of it."""
        return 1

    @property
    @abstractmethod
    def bits_per_element(self) -> float:
        """Bits on the wire per element of a long tensor, side information included."""

    @abstractmethod
    def packet_bytes(self, num_elements: int) -> int:
        """Size in bytes of the packet of `num_elements` elements, known before encoding; 0 of them leave a header."""

    def places(self, num_elements: int) -> Sequence[tuple[int, int]] | None:
        """Where the bytes of blocks lie in a packet of `num_elements`: its parts, as (first byte, bytes of a block).

        In each part the blocks stand one behind another, and zeros have the same bytes whatever the seed. None: blocks
        share bytes.
        """
        return None

    @property
    def has_variable_length(self) -> bool:
        """Whether `length` depends on the values; `packet_bytes` is then the most it can be."""
        return False

    def length(self, packet: Tensor) -> int:
        """How many of the packet's bytes, from the first, need to travel."""
        return packet.numel()

    @abstractmethod
    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        """Pack a tensor into a packet.

        Args:
            x: floating, any shape and strides; only read.
            seed, counter: element i draws its randomness from (seed, counter + i).
            out: uint8 [packet_bytes(x.numel())], where the packet is written; a new tensor by default.

        Returns the packet.
        """

    def encode_all(
        self, xs: Sequence[Tensor], outs: Sequence[Tensor], *, seed: int = 0, counters: Sequence[int]
    ) -> None:
        """Pack tensors of one length into a packet each, in one call of a kernel where one exists.

        Args:
            xs: n elements each, at least one tensor; see `encode`.
            outs: uint8 [packet_bytes(n)] each, where the packets are written.
            seed, counters: element i of tensor j draws its randomness from (seed, counters[j] + i).
        """
        for x, out, counter in zip(xs, outs, counters, strict=True):
            self.encode(x, seed=seed, counter=counter, out=out)

    def encode_rows(self, rows: Tensor, numbers: Tensor, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
        """Pack rows that have a number each: the packet of `encode`, with other draws.

        Integers, powers of two, and rotations of these: element j of row i draws its randomness from (seed, numbers[i]
        * width + j), so a row is rounded alike whichever rows stand beside it. Other codecs that draw count on from the
        first row.

        Args:
            rows: floating [n, width], width a multiple of `block`.
            numbers: int64 [n].
            out: uint8 [packet_bytes(n * width)], where the packet is written; a new tensor by default.
        """
        first = int(numbers[0]) if len(numbers) else 0
        return self.encode(rows, seed=seed, counter=first * rows.shape[1], out=out)

    @abstractmethod
    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        """Unpack a packet.

        Args:
            packet: uint8 [packet_bytes(num_elements)].
            num_elements: of the tensor that was packed.
            out: fp32 [num_elements], where the values are written; a new tensor by default.

        Returns the values, fp32 [num_elements].
        """

    def decode_add(self, packet: Tensor, out: Tensor) -> Tensor:
        """out += decode(packet), fused where a kernel exists.

        Args:
            packet: uint8 [packet_bytes(n)].
            out: fp32 [n], changed in place and returned.
        """
        return out.add_(self.decode(packet, out.numel()))

    def decode_sum(self, packets: Sequence[Tensor], out: Tensor, *, add: bool = False) -> Tensor:
        """out = decode(p_0) + decode(p_1) + ..., in one pass over `out` where a kernel exists.

        Args:
            packets: uint8 [packet_bytes(n)] each, at least one. The sum is taken in their order.
            out: fp32 [n], changed in place and returned.
            add: out += decode(p_0), out += decode(p_1), ...
        """
        for number, packet in enumerate(packets):
            if add or number:
                self.decode_add(packet, out)
            else:
                self.decode(packet, out.numel(), out=out)
        return out

    def decode_all(self, packets: Sequence[Tensor], outs: Sequence[Tensor], *, add: bool = False) -> None:
        """Unpack each packet into its tensor, in one call of a kernel where one exists.

        Args:
            packets: uint8 [packet_bytes(n)] each, at least one.
            outs: fp32 [n] each, changed in place.
            add: add the values to the tensors.
        """
        for packet, out in zip(packets, outs, strict=True):
            self.decode_sum([packet], out, add=add)

    def packet_add(self, packet: Tensor, out: Tensor) -> Tensor:
        """Add a packet to `out`, which then decodes to the sum of what both decode to.

        Args:
            packet: uint8, of a linear codec.
            out: uint8, of the same codec, seed, counter and length; changed in place and returned.

        Raises ValueError for a codec that is not linear.
        """
        raise ValueError(f"packets of {self} can't be added: decode them, or use a linear codec such as Identity")

    def marks(self, packet: Tensor, num_elements: int) -> Tensor | None:
        """Which groups of the packet are marked, bool [groups]; None: none of them. See `encode_marked`."""
        return None

    def has_marks(self, packets: Sequence[Tensor], num_elements: int) -> bool:
        """Whether any of the packets has a marked group."""
        return any(self.marks(packet, num_elements) is not None for packet in packets)

    def encode_marked(self, x: Tensor, marks: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor) -> Tensor:
        """Pack a tensor with one more bit for each group, which `marks` reads back.

        Args:
            x, seed, counter, out: see `encode`.
            marks: bool [groups].

        Raises ValueError for a codec whose groups have no such bit.
        """
        raise ValueError(f"groups of {self} can't be marked: use integers")

    @property
    def rotation(self) -> Rotation | None:
        """This codec as a rotation around another one, or None.

        A rotation commutes with sums, so a collective rotates back once: see `RotatedSum`.
        """
        return None

    def backend(self, device: torch.device) -> str:
        """Which implementation runs on `device`: 'torch', 'numba' or 'torch.compile'."""
        return "torch"


class Rotation(Protocol):
    """A codec that rotates: `inner` encodes the rotated values, in rows of `block_size` elements."""

    @property
    def inner(self) -> Codec: ...

    @property
    def block_size(self) -> int: ...

    def around(self, inner: Codec) -> Rotation:
        """The same rotation around another codec."""
        ...

    def rotate_(self, x: Tensor) -> Tensor:
        """Rotate x in place; a second rotation undoes it.

        Shape:
            x: flat fp32, of whole rows.
        """
        ...

    def rotate_back_(self, x: Tensor, left_alone: Tensor | None) -> Tensor:
        """Rotate the rows of x in place, except those of `left_alone`.

        Shape:
            x: flat fp32, of whole rows. left_alone: bool [rows], or None for no row.
        """
        ...

    def left_alone(self, packet: Tensor, num_elements: int) -> Tensor | None:
        """Which rows of the packet are not rotated, bool [rows]; None: none of them."""
        ...

    def encode_rotated(
        self, x: Tensor, left_alone: Tensor | None, *, seed: int = 0, counter: int = 0, out: Tensor
    ) -> Tensor:
        """Pack `x`, whose rows are rotated already except those of `left_alone`; may change x.

        Shape:
            x: flat fp32, of whole blocks. left_alone: bool [rows], or None for no row. out: the packet.
        """
        ...
