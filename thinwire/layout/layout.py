"""Where tensors lie in a flat tensor. Holds no tensors and no communicator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Self

import torch
from torch import Tensor

from thinwire.codecs import Codec


@dataclass(frozen=True)
class Span:
    """A tensor, or its elements [offset, offset + numel), and where they lie: in `length` columns from `start` on."""

    name: str
    shape: torch.Size
    start: int = 0
    length: int = 0
    offset: int = 0

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def end(self) -> int:
        """The first column after its elements, in a layout of one row."""
        return self.start + self.numel

    def of(self, flat: Tensor) -> Tensor:
        """A view of its elements in a flat tensor of one row, in their own shape."""
        return flat[self.start : self.end].view(self.shape)

    def part(self, whole: Tensor) -> Tensor:
        """A flat view of its elements in the whole tensor that they belong to."""
        return whole.view(-1)[self.offset : self.offset + self.numel]


@dataclass(frozen=True)
class Layout:
    """Tensors side by side in a flat tensor [rows, width]; each has the same columns in every row. The rest is zero.

    Element i of a tensor with `length` columns lies in row i // length. With one row, tensors lie one after the other,
    as in buckets and fragments. With one row per rank, each tensor is cut into a slice for every rank, so the owner of
    an element depends only on its own tensor.
    """

    spans: tuple[Span, ...] = ()
    width: int = 0
    rows: int = 1

    @classmethod
    def beside(cls, spans: Iterable[Span], rows: int = 1, unit: int = 1) -> Self:
        """Place these spans side by side in their order. Each gets a multiple of `unit` columns."""
        placed: list[Span] = []
        width = 0
        for span in spans:
            length = -(-span.numel // (rows * unit)) * unit
            placed.append(replace(span, start=width, length=length))
            width += length
        return cls(tuple(placed), width, rows)

    @classmethod
    def of(cls, shapes: Mapping[str, torch.Size], rows: int = 1, unit: int = 1) -> Self:
        """Place whole tensors, given by name and shape; see `beside`."""
        return cls.beside((Span(name, shape) for name, shape in shapes.items()), rows, unit)

    @property
    def numel(self) -> int:
        """Elements of the flat tensor, padding included."""
        return self.rows * self.width

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of columns of each tensor."""
        return tuple(span.length for span in self.spans)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {span.name: span.shape for span in self.spans}

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def zeros(self) -> Tensor:
        """A flat tensor of zeros, fp32 on the CPU."""
        return torch.zeros(self.numel)

    def pack(self, values: Iterable[Tensor | None], out: Tensor) -> Tensor:
        """Write tensors of any shape into `out`, [numel] or [rows, width]. None and the gaps become zeros."""
        table, end = out.view(self.rows, self.width), 0
        for span, value in zip(self.spans, values, strict=True):
            columns, end = table[:, span.start : span.start + span.length], span.start + span.length
            if value is None:
                columns.zero_()
            elif self.rows == 1:
                span.of(table[0]).copy_(value.reshape(span.shape))
                if span.numel < span.length:
                    columns[0, span.numel :].zero_()
            else:
                padded = torch.nn.functional.pad(value.reshape(-1), (0, columns.numel() - span.numel))
                columns.copy_(padded.view(columns.shape))
        if end < self.width:
            table[:, end:].zero_()
        return out

    def unpack(self, flat: Tensor) -> list[Tensor]:
        """Flat copies of the tensors. Copies, because the position in memory can change how a matrix product rounds."""
        table = flat.view(self.rows, self.width)
        columns = ((span, table[:, span.start : span.start + span.length]) for span in self.spans)
        return [part.reshape(-1)[: span.numel].clone() for span, part in columns]

    def flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """A new flat tensor, fp32 [numel] on the CPU, that holds the tensors of these names."""
        return self.pack((values[span.name] for span in self.spans), self.zeros())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the tensors in a flat tensor of one row, by name, in their shapes."""
        return {span.name: span.of(flat) for span in self.spans}

    def within(self, start: int, end: int) -> Iterator[tuple[Span, int, int]]:
        """Yield (span, first, last) for the spans of one row whose elements [first, last) lie in [start, end)."""
        for span in self.spans:
            first, last = max(span.start, start), min(span.end, end)
            if first < last:
                yield span, first, last


def sliced(numels: Iterable[int], world_size: int, *codecs: Codec) -> Layout:
    """A layout of tensors with these numbers of elements. Each is cut into a slice of whole codec blocks per rank."""
    shapes = {str(number): torch.Size([numel]) for number, numel in enumerate(numels)}
    return Layout.of(shapes, world_size, lcm(*(codec.block for codec in codecs)))
