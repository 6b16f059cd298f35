"""What one rank puts into a checkpoint: pieces that any layout can take, and the rest, which only its own can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint.boxes import Box, split

# What stands for a tensor in a tree of JSON; for a mapping whose keys are not strings.
TENSOR, ITEMS = "__tensor__", "__items__"


@dataclass(frozen=True)
class Piece:
    """Elements [offset, offset + n) of a tensor that has `numel` elements when it is flat.

    values: [n], a view of the memory that they are saved from and loaded into. is_copy: every rank holds the same, so
    that any of them may save it; holders: of these ranks alone, where it is not empty. run, row, first: where the
    tensor is cut inside of its rows, a rank's part of it has elements [first, first + run) of each `row` elements, and
    `offset` counts in that part; 0: it is not cut so.
    """

    numel: int
    offset: int
    values: Tensor
    is_copy: bool = False
    run: int = 0
    row: int = 0
    first: int = 0
    holders: tuple[int, ...] = ()

    def boxes(self) -> Iterator[Box]:
        """Where its elements lie in the whole tensor: one box, or three where it is cut inside of rows."""
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
        """All of a tensor, which must be contiguous."""
        return cls(tensor.numel(), 0, tensor.detach().view(-1), is_copy)

    def share(self, number: int, count: int) -> Piece:
        """The part that the `number`-th of `count` ranks saves of what all of them hold."""
        if not self.is_copy:
            return self
        n = self.values.numel()
        start, end = n * number // count, n * (number + 1) // count
        return replace(self, offset=self.offset + start, values=self.values[start:end], is_copy=False)


@dataclass(frozen=True)
class Share:
    """This rank's share of a mean over ranks, in elements [offset, offset + length) of a parameter.

    The mean is of an error that is fed back, or of a momentum; `kind` says of which. The share lies in the rank's own
    state, at elements [start, start + length) of the tensor `path`. mean = sum over ranks of weight * values. numel,
    run, row, first: as of a Piece, where `offset` counts in a part of the parameter.
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
        """Elements of the parameter, as far as this share knows."""
        return self.numel or self.offset + self.length

    def piece(self, values: Tensor) -> Piece:
        """Its values as a piece of the parameter."""
        return Piece(self.whole_numel, self.offset, values, run=self.run, row=self.row, first=self.first)

    def below(self, prefix: str) -> Share:
        """The same, where the state that holds it lies under `prefix`."""
        return replace(self, path=f"{prefix}/{self.path}")


@dataclass
class Snapshot:
    """A rank's state between two steps.

    pieces: by name; every element of a name is held by some rank. scalars: {kind: {parameter: number}} of the user's
    optimizer. own: nested containers of tensors and numbers that only the same `layout` takes back, bit for bit.
    common: numbers that are the same on all ranks, whatever the layout. shares: of what lies in `own`, what another
    layout can take over. left: {key of `own`: why no other layout takes it}, for the load report.
    """

    layout: dict[str, Any]
    pieces: dict[str, Piece] = field(default_factory=dict)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)
    own: Any = None
    common: dict[str, Any] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def to_json(self, rank: int) -> tuple[dict[str, Any], dict[str, Piece]]:
        """(What is no tensor, as JSON; all tensors by name, those of `own` under the rank's number)."""
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
    """The name of a tensor of a rank's own state."""
    return f"own/{rank}/{path}"


def _to_tree(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON; its tensors go into `tensors` by their place, such as errors/0/1."""
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
    """What `_to_tree` was given, with tuples as lists."""
    if isinstance(tree, list):
        return [from_tree(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TENSOR in tree:
        return tensors[tree[TENSOR]]
    items = tree[ITEMS] if ITEMS in tree else tree.items()
    return {key: from_tree(item, tensors) for key, item in items}


def tensors_of(tree: Any) -> Iterator[tuple[str, list[int], torch.dtype]]:
    """(path, shape, dtype) of the tensors that a tree names. Raises ValueError for a dtype that is none."""
    if isinstance(tree, list):
        for item in tree:
            yield from tensors_of(item)
    elif isinstance(tree, dict) and TENSOR in tree:
        yield tree[TENSOR], tree["shape"], dtype_named(tree["dtype"])
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_of(item)


def dtype_named(name: str) -> torch.dtype:
    """torch's dtype of that name; raises ValueError for another word."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)
