"""One rank's part of a checkpoint: pieces that any layout can load, and state that only the same layout can load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint.boxes import Box, split

# Keys that mark a tensor in a tree of JSON, and a mapping whose keys are not strings.
TENSOR, ITEMS = "__tensor__", "__items__"


@dataclass(frozen=True)
class Piece:
    """Elements [offset, offset + n) of a tensor that has `numel` elements when flat.

    Args:
        values: [n], a view of the memory that is saved or loaded.
        is_copy: every rank holds the same values, so any of them may save them.
        holders: the ranks that hold the same values; empty for all ranks.
        name: of the tensor in a checkpoint, if a rank holds several pieces of it; empty: the key of the piece.
        run, row, first: where the tensor is cut inside its rows, a rank's part has elements [first, first + run) of
            each `row` elements, and `offset` counts in that part. 0: the rows are not cut.
    """

    numel: int
    offset: int
    values: Tensor
    is_copy: bool = False
    run: int = 0
    row: int = 0
    first: int = 0
    holders: tuple[int, ...] = ()
    name: str = ""

    def boxes(self) -> Iterator[Box]:
        """The piece as boxes of the whole tensor: one box, or up to three where rows are cut."""
        n, run = self.values.numel(), self.run or self.numel
        row = self.row if self.run else self.numel
        for number, inside, at, height, width in split(self.offset, n, run):
            yield Box(number * row + self.first + inside, height, width, row, at, run)

    def place_of(self, at: int) -> int:
        """The place in the whole tensor of element `at` of the values."""
        number, inside = divmod(self.offset + at, self.run or self.numel)
        return number * self.row + self.first + inside

    @classmethod
    def whole(cls, tensor: Tensor, *, is_copy: bool = True) -> Piece:
        """A piece of all of a contiguous tensor."""
        return cls(tensor.numel(), 0, tensor.detach().view(-1), is_copy)

    def share(self, number: int, count: int) -> Piece:
        """The part that the `number`-th of `count` ranks saves of values that all of them hold."""
        if not self.is_copy:
            return self
        n = self.values.numel()
        start, end = n * number // count, n * (number + 1) // count
        return replace(self, offset=self.offset + start, values=self.values[start:end], is_copy=False)


@dataclass(frozen=True)
class Share:
    """This rank's share of a mean over ranks, in elements [offset, offset + length) of a parameter.

    The mean, over an error that is fed back or a momentum, is the sum over ranks of weight * values.

    Args:
        kind: what the mean is of.
        path, start, length: the share is elements [start, start + length) of the tensor `path` of the rank's own state.
        numel, run, row, first: see Piece; `offset` counts in a part of the parameter.
    """

    kind: str
    name: str
    path: str
    start: int
    offset: int
    length: int
    weight: float
    numel: int = 0
    run: int = 0
    row: int = 0
    first: int = 0

    @property
    def whole_numel(self) -> int:
        """Number of elements of the parameter, as far as this share knows."""
        return self.numel or self.offset + self.length

    def piece(self, values: Tensor) -> Piece:
        """The values as a piece of the parameter."""
        return Piece(self.whole_numel, self.offset, values, run=self.run, row=self.row, first=self.first)

    def below(self, prefix: str) -> Share:
        """The same share where the state that holds it lies under `prefix`."""
        return replace(self, path=f"{prefix}/{self.path}")


@dataclass
class Snapshot:
    """A rank's state between two steps.

    Args:
        pieces: by name; every element of a tensor is held by some rank.
        scalars: {kind: {parameter: number}} of the user's optimizer.
        own: nested containers of tensors and numbers that only the same `layout` can load, bit for bit.
        common: numbers that are the same on all ranks, whatever the layout.
        shares: the parts of `own` that another layout can also load.
        left: {key of `own`: why no other layout can load it}, for the load report.
        in_place: the tensors are too large for copies: they are written from where they lie, while training waits.
    """

    layout: dict[str, Any]
    pieces: dict[str, Piece] = field(default_factory=dict)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)
    own: Any = None
    common: dict[str, Any] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    in_place: bool = False

    def to_json(self, rank: int) -> tuple[dict[str, Any], dict[str, Piece]]:
        """The rest as JSON, and all tensors by name; tensors of `own` are named by the rank's number."""
        tensors: dict[str, Tensor] = {}
        tree = _to_tree(self.own, "", tensors)
        own = {own_name(rank, path): Piece.whole(t.contiguous(), is_copy=False) for path, t in tensors.items()}
        text = {
            "layout": self.layout,
            "scalars": self.scalars,
            "own": tree,
            "common": self.common,
            "shares": [list(asdict(share).values()) for share in self.shares],
            "left": self.left,
        }
        return text, self.pieces | own


def own_name(rank: int, path: str) -> str:
    """The name of a tensor in a rank's own state."""
    return f"own/{rank}/{path}"


def _to_tree(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON. Its tensors are added to `tensors` under their place, such as errors/0/1."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {TENSOR: path, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        items = {key: _to_tree(item, _join(path, key), tensors) for key, item in value.items()}
        return items if all(isinstance(key, str) for key in items) else {ITEMS: [list(item) for item in items.items()]}
    if isinstance(value, list | tuple):
        return [_to_tree(item, _join(path, number), tensors) for number, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} at {path!r} is neither a tensor nor a number: it can't be saved")


def from_tree(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `_to_tree`, with lists in place of tuples."""
    if isinstance(tree, list):
        return [from_tree(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TENSOR in tree:
        return tensors[tree[TENSOR]]
    items = tree[ITEMS] if ITEMS in tree else tree.items()
    return {key: from_tree(item, tensors) for key, item in items}


def tensors_of(tree: Any) -> Iterator[tuple[str, list[int], torch.dtype]]:
    """Yield (path, shape, dtype) of the tensors that a tree names. Raises ValueError for an unknown dtype."""
    if isinstance(tree, list):
        for item in tree:
            yield from tensors_of(item)
    elif isinstance(tree, dict) and TENSOR in tree:
        yield tree[TENSOR], tree["shape"], dtype_named(tree["dtype"])
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_of(item)


def dtype_named(name: str) -> torch.dtype:
    """torch's dtype of that name. Raises ValueError for another word."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)
