"""Which matrices are cut into tiles, and where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.errors import ConfigError

# Matrices of so many elements at most share a bucket with others, and are cut only where they are named.
LEAST_NUMEL = 1 << 19


@dataclass(frozen=True)
class TileGrid:
    """Cut the inputs of some matrices into `inputs` parts, and their outputs into `outputs` parts.

    pattern: a regular expression; of the modules whose names contain a match. Empty: all large ones.
    """

    pattern: str
    inputs: int
    outputs: int

    @classmethod
    def parse(cls, text: str) -> tuple[TileGrid, ...]:
        """The grids of a text such as "1x8" or "lm_head=1x16,mlp=2x4". Raises ConfigError with a valid spelling."""
        grids = tuple(cls._of(part.strip()) for part in text.split(","))
        if all(grid.inputs == grid.outputs == 1 for grid in grids):
            raise ConfigError(f"tile {text!r}: one part cuts nothing; nearest: '1x2', or no tile")
        return grids

    @classmethod
    def _of(cls, text: str) -> TileGrid:
        pattern, equals, grid = text.rpartition("=")
        found = re.fullmatch(r"(\d+)x(\d+)", grid)
        if found is None or (equals and not pattern) or not all(map(int, found.groups())):
            raise ConfigError(
                f"tile {text!r}: must be parts of the inputs x parts of the outputs, perhaps behind a name and '=': "
                "nearest: '1x8', or 'lm_head=1x8'"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"tile {text!r}: {pattern!r} is not a regular expression: {error}; nearest: {re.escape(pattern)!r}"
            ) from None
        return cls(pattern, int(found[1]), int(found[2]))

    def takes(self, name: str, numel: int) -> bool:
        """Whether a module of this name, with a matrix of `numel` elements, is cut."""
        return bool(re.search(self.pattern, name)) if self.pattern else numel > LEAST_NUMEL

    def __str__(self) -> str:
        return f"{self.pattern}{'=' if self.pattern else ''}{self.inputs}x{self.outputs}"


def cuts(length: int, parts: int) -> Iterator[slice]:
    """The ranges of `length` cut into `parts`, as equal as can be."""
    return (slice(length * number // parts, length * (number + 1) // parts) for number in range(parts))
