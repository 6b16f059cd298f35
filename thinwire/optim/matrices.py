"""Base of the optimizers whose updates of matrices are orthogonal, and how a host cuts such matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.optim.parameterwise import check_adamw
from thinwire.optim.sums import Part, PieceSpan, SummingOptimizer, codec_of_sums

# Of the matrices of a stack.
LEAST_SIDE = 8


class MatrixOptimizer(SummingOptimizer):
    """Updates matrices, and each matrix of a stack of them, as a whole; all else by AdamW's step.

    params: tensors or groups, as for torch's optimizers. A group with `orthogonal` False, such as embeddings and heads,
    takes AdamW's step with `betas` and `eps`. With True it may hold nothing but matrices and stacks of them; by default
    these are updated as a whole, and what else it holds takes AdamW's step.

    Raises ConfigError for values outside of lr >= 0, 0 <= momentum, b < 1, eps > 0, weight_decay >= 0, for a vector in
    a group with `orthogonal` True, and for a codec of variable length.
    """

    # Shapes that further axes cut, by name.
    shapes: Mapping[str, torch.Size] = {}

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        orthogonal: bool | None = None,
        codec: str = "bf16",
    ) -> None:
        self.codec = codec_of_sums(self.title, codec)
        given = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._is_built = False
        super().__init__(params, {**given, "orthogonal": orthogonal})
        self._is_built = True
        self._check_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer; raises ConfigError as the constructor does."""
        super().add_param_group(param_group)
        if self._is_built:
            self._check_groups()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. Groups of an optimizer without `orthogonal` get its default."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.setdefault("orthogonal", None)
        self._check_groups()

    def _check_groups(self) -> None:
        """Raise ConfigError for values out of range, or for all vectors in groups with orthogonal updates."""
        for group in self.param_groups:
            momentum = group["momentum"]
            is_good = 0 <= momentum < 1
            check_adamw(self.title, group, ("momentum", momentum, is_good, "at least 0 and below 1; the usual: 0.95"))
        wrong = []
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names", [f"number {place}" for place in range(len(group["params"]))])
            for name, param in zip(names, group["params"], strict=True):
                if group["orthogonal"] and not is_matrix(param):
                    wrong.append(
                        f"{self.title}: parameter {name} of group {number}, of shape {tuple(param.shape)}, is no "
                        f"matrix, and only matrices and stacks of them, of {LEAST_SIDE} rows and columns or more, have "
                        "orthogonal updates; nearest: a group with "
                        "orthogonal=False, which takes AdamW's step"
                    )
        if wrong:
            raise ConfigError(*wrong)

    def is_across(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the parameter is a matrix, or a stack of them, in a group with orthogonal updates."""
        return group["orthogonal"] is not False and is_matrix(param)


def is_matrix(param: Tensor) -> bool:
    """Whether a parameter is a matrix or a stack of them."""
    return param.dim() == 2 or is_stack(param.shape)


def is_stack(shape: torch.Size) -> bool:
    """Whether a tensor of this shape is a stack of matrices, such as a layer's experts, and no convolution.

    The last side of a convolution over sequences is its kernel, of which a few elements make no matrix.
    """
    return len(shape) == 3 and min(shape[1:]) >= LEAST_SIDE


def matrices_of(parts: Mapping[str, Part]) -> Iterator[tuple[str, str, tuple[PieceSpan, ...], int]]:
    """(parameter, number of a matrix in it, the elements that each rank has of the matrix, the rank that owns it).

    The owner is the rank that holds most of the matrix, of equals the one with the least work so far.
    """
    work = [0] * max((len(part.spans) for part in parts.values()), default=0)
    for name, part in parts.items():
        rows, columns = part.shape[-2:]
        for key, pieces in pieces_of(part).items():
            lengths = [last - first for first, last in pieces]
            owner = max(range(len(pieces)), key=lambda rank: (lengths[rank], -work[rank]))
            work[owner] += rows * columns * min(rows, columns)
            yield name, key, pieces, owner


def on_one(owner: int, num_ranks: int, length: int) -> tuple[PieceSpan, ...]:
    """For each rank, its span of rows all of which `owner` has."""
    return tuple((0, length) if rank == owner else (0, 0) for rank in range(num_ranks))


def pieces_of(part: Part) -> dict[str, tuple[PieceSpan, ...]]:
    """For each matrix of a stack, by its number: the elements that each rank holds."""
    size, found = part.shape[-2:].numel(), dict[str, tuple[PieceSpan, ...]]()
    for number in range(part.shape.numel() // size if size else 0):
        inside = [(first - number * size, last - number * size) for first, last in part.spans]
        held = [(max(first, 0), min(last, size)) for first, last in inside]
        found[str(number)] = tuple(span if span[0] < span[1] else (0, 0) for span in held)
    return found


def move(param: Tensor, update: Tensor, shape: torch.Size, group: dict[str, Any]) -> None:
    """Take a step along `update`.

    Args:
        param: a whole matrix or a piece of it, changed in place.
        update: in the shape of `param`.
        shape: of the whole matrix.
    """
    param.mul_(1 - group["lr"] * group["weight_decay"])
    param.add_(update, alpha=-0.2 * math.sqrt(max(shape[-2:])) * group["lr"])
