"""Where a piece of a tensor lies: boxes of equal rows, and what two boxes have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Copy(NamedTuple):
    """`height` rows of `width` elements, at `at` and every `pitch` of a flat tensor, that are in another, too.

    from_, from_pitch: where they are there.
    """

    at: int
    pitch: int
    from_: int
    from_pitch: int
    height: int
    width: int

    def target(self, flat: Tensor) -> Tensor:
        """[height, width], a view of the tensor that is written."""
        return rows_of(flat, self.at, self.pitch, self.height, self.width)

    def source(self, flat: Tensor) -> Tensor:
        """[height, width], a view of the tensor that is read."""
        return rows_of(flat, self.from_, self.from_pitch, self.height, self.width)

    @property
    def is_run(self) -> bool:
        """Whether neighbours stay neighbours."""
        return self.height == 1 or self.pitch == self.from_pitch == self.width


@dataclass(frozen=True)
class Box:
    """Elements place + i stride + j of a flat tensor, i < height, j < width <= stride; no row passes a multiple of it.

    They lie at `at` + i pitch + j of a piece's values. stride: the tensor's elements where it is not cut inside rows.
    """

    place: int
    height: int
    width: int
    stride: int
    at: int
    pitch: int

    @property
    def numel(self) -> int:
        return self.height * self.width

    def of(self, flat: Tensor) -> Tensor:
        """[height, width], a view of the flat tensor."""
        return rows_of(flat, self.place, self.stride, self.height, self.width)

    def values(self, flat: Tensor) -> Tensor:
        """[height, width], a view of the piece's values."""
        return rows_of(flat, self.at, self.pitch, self.height, self.width)

    def on(self, stride: int) -> Iterator[Box]:
        """The same elements in boxes of that stride."""
        if self.stride == stride:
            yield self
            return
        for row in range(self.height):
            begin, at = self.place + row * self.stride, self.at + row * self.pitch
            for number, inside, start, height, width in split(begin, self.width, stride):
                yield Box(number * stride + inside, height, width, stride, at + start, stride)

    def shared_with(self, other: Box) -> Iterator[Copy]:
        """What this box, which is written, has in common with the other, which is read."""
        stride = min((box.stride for box in (self, other) if box.height > 1), default=max(self.stride, other.stride))
        for mine in self.on(stride):
            for theirs in other.on(stride):
                yield from mine._met(theirs)

    def _met(self, other: Box) -> Iterator[Copy]:
        (row, column), (their_row, their_column) = divmod(self.place, self.stride), divmod(other.place, self.stride)
        top, left = max(row, their_row), max(column, their_column)
        height = min(row + self.height, their_row + other.height) - top
        width = min(column + self.width, their_column + other.width) - left
        if height > 0 and width > 0:
            yield Copy(
                self.at + (top - row) * self.pitch + left - column, self.pitch,
                other.at + (top - their_row) * other.pitch + left - their_column, other.pitch,
                height, width,
            )  # fmt: skip


def split(offset: int, length: int, run: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Elements [offset, offset + length) of runs of `run`: the end of one run, whole runs, the start of one.

    (Number of the run, place in it, place in what is split, runs, elements of each.)
    """
    at = 0
    while at < length:
        number, inside = divmod(offset + at, run)
        height = 1 if inside else max(1, (length - at) // run)
        width = min(run - inside, length - at)
        yield number, inside, at, height, width
        at += height * width


def rows_of(flat: Tensor, at: int, pitch: int, height: int, width: int) -> Tensor:
    """[height, width]: a view of rows that begin at `at` and every `pitch` elements of a flat tensor."""
    return flat.as_strided((height, width), (pitch, 1), flat.storage_offset() + at)
