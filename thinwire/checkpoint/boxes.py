"""The place of a piece in its tensor: boxes of equal rows, and the intersection of two boxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Copy(NamedTuple):
    """The elements that a target box and a source box share: `height` rows of `width` elements.

    Args:
        at, pitch: first element of the first row, and distance between rows, in the flat tensor that is written.
        from_, from_pitch: the same in the flat tensor that is read.
    """

    at: int
    pitch: int
    from_: int
    from_pitch: int
    height: int
    width: int

    def target(self, flat: Tensor) -> Tensor:
        """The rows as a view of the tensor that is written; [height, width]."""
        return rows_of(flat, self.at, self.pitch, self.height, self.width)

    def source(self, flat: Tensor) -> Tensor:
        """The rows as a view of the tensor that is read; [height, width]."""
        return rows_of(flat, self.from_, self.from_pitch, self.height, self.width)

    @property
    def is_run(self) -> bool:
        """Whether the elements are contiguous in both tensors."""
        return self.height == 1 or self.pitch == self.from_pitch == self.width


@dataclass(frozen=True)
class Box:
    """Elements place + i stride + j of a flat tensor, i < height, j < width <= stride.

    No row of the box crosses a multiple of `stride`. In the piece's values, element (i, j) is at `at` + i pitch + j.
    `stride` is the number of elements of the tensor where the tensor is not cut inside its rows.
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
        """The box as a view of the flat tensor; [height, width]."""
        return rows_of(flat, self.place, self.stride, self.height, self.width)

    def values(self, flat: Tensor) -> Tensor:
        """The box as a view of the piece's values; [height, width]."""
        return rows_of(flat, self.at, self.pitch, self.height, self.width)

    def on(self, stride: int) -> Iterator[Box]:
        """The same elements as boxes of another stride."""
        if self.stride == stride:
            yield self
            return
        for row in range(self.height):
            begin, at = self.place + row * self.stride, self.at + row * self.pitch
            for number, inside, start, height, width in split(begin, self.width, stride):
                yield Box(number * stride + inside, height, width, stride, at + start, stride)

    def shared_with(self, other: Box) -> Iterator[Copy]:
        """The elements shared by this box, which is written, and `other`, which is read."""
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
    """Cut elements [offset, offset + length) at multiples of `run`: the end of one run, whole runs, the start of one.

    Yields (number of the run, place in the run, place in the range, number of runs, elements of each run).
    """
    at = 0
    while at < length:
        number, inside = divmod(offset + at, run)
        height = 1 if inside else max(1, (length - at) // run)
        width = min(run - inside, length - at)
        yield number, inside, at, height, width
        at += height * width


def rows_of(flat: Tensor, at: int, pitch: int, height: int, width: int) -> Tensor:
    """A view of the rows that begin at `at` and every `pitch` elements of a flat tensor; [height, width]."""
    return flat.as_strided((height, width), (pitch, 1), flat.storage_offset() + at)
