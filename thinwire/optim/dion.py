"""Dion as an optimizer: orthonormal updates of low rank for matrices, wherever they are cut; AdamW for all else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.errors import ConfigError
from thinwire.optim.matrices import MatrixOptimizer, matrices_of, move, on_one, pieces_of
from thinwire.optim.sums import Part, PieceSpan, Record, Sum, Update

TINY = torch.finfo(torch.float32).tiny
# A column of R that is shorter beside the longest is rounding.
NOISE = 1e-5
FACTOR = "factor"
# Every run starts its power iterations from the same columns, however its matrices are cut.
SEED = 0


class Beyond(Protocol):
    """Ranks of a further axis, such as tensor: each has a part of what the summing ranks have whole.

    Methods are collectives.
    """

    def basis(self, name: str, x: Tensor) -> Tensor:
        """The same rows of an orthonormal basis, from rows x [rows, r], or terms of them, of a matrix of `name`."""
        ...

    def total(self, name: str, x: Tensor) -> Tensor:
        """The sum of the terms x [r, columns]."""
        ...

    def lengths(self, name: str, x: Tensor) -> Tensor:
        """The 2-norms [r] of the rows of such a sum, whose columns may be divided over ranks."""
        ...

    def first_column(self, name: str, columns: int) -> int:
        """The number of this rank's first column in the whole parameter."""
        ...


class Nothing:
    """No further axis."""

    def basis(self, name: str, x: Tensor) -> Tensor:
        return basis_of(x)

    def total(self, name: str, x: Tensor) -> Tensor:
        return x

    def lengths(self, name: str, x: Tensor) -> Tensor:
        return x.norm(dim=1)

    def first_column(self, name: str, columns: int) -> int:
        return 0


def basis_of(x: Tensor) -> Tensor:
    """An orthonormal basis [m, r] of the columns of x [m, r], r <= m; of zeros, the first unit vectors."""
    return torch.linalg.qr(x).Q


def unit_rows(r: Tensor, lengths: Tensor) -> Tensor:
    """Rows of r [..., r, n] at length 1, from their lengths [..., r]; rounding beside the longest stays short."""
    longest = lengths.amax(dim=-1, keepdim=True)
    return r / lengths.maximum(NOISE * longest).clamp_min(TINY)[..., None]


class Block(NamedTuple):
    """A piece's elements of one matrix of `columns` columns: the end of a row, whole rows, the start of a row.

    own: the elements in the flat piece. before: elements of the first row that other ranks hold.
    """

    own: slice
    before: int
    columns: int

    def rows(self, flat: Tensor) -> Tensor:
        """The elements as whole rows [rows, columns], with zeros for what other ranks hold.

        A view if they hold nothing.
        """
        own = flat[self.own]
        after = -(self.before + len(own)) % self.columns
        return (pad(own, (self.before, after)) if self.before or after else own).view(-1, self.columns)

    def cut(self, rows: Tensor) -> Tensor:
        """This rank's elements of such rows, flat."""
        return rows.reshape(-1)[self.before :][: self.own.stop - self.own.start]


class DionOptimizer(MatrixOptimizer):
    """Muon at rank r. Per matrix X [m, n] with gradient G, momentum M, and Q [n, r] of the last step:

        B = M + G
        P = orthonormal basis of the columns of B Q      R = B^T P
        M <- B - (1 - momentum) P R^T                    what is not applied stays: error feedback
        Q <- R, its columns scaled to length 1
        X <- (1 - lr decay) X - 0.2 sqrt(max(m, n)) lr P Q^T

    The factor is that of `thinwire.Muon`. Where the momentum changes slowly, P and Q approach its leading singular
    vectors. Columns of R that are rounding beside the longest, below 1e-5 of it, count as that long. A tensor of three
    dimensions is a stack of matrices, if these have 8 rows and columns or more. All other tensors, and those of a group
    with `orthogonal` False take AdamW's step with `betas` and `eps`.

    params: tensors or groups, as for torch's optimizers. State: `momentum` and `factor`, Q of the matrices that a piece
    touches, fp32; or AdamW's `step`, `exp_avg`, `exp_avg_sq`. Not elementwise. Where a host cuts a matrix, each rank
    multiplies the elements that it has; the one that has most of it adds up the products and takes the basis. So r
    numbers for each row and column travel in place of the matrix, in `codec`, there and back. What the codec loses of
    P and R stays in the momentum.

    Raises ConfigError for values outside of rank >= 1, lr >= 0, 0 <= momentum, b < 1, eps > 0, weight_decay >= 0, for
    a vector in a group with `orthogonal` True, and for a codec of variable length.
    Source: Ahn, Xu, Abreu and Langford, "Dion: Distributed orthonormalized updates" (2025), algorithms 1 and 3.
    """

    title = "dion"
    num_rounds = 4
    operation = "orthonormal updates"
    # Who has the other parts of what further axes cut.
    beyond: Beyond = Nothing()

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
        rank: int = 64,
        codec: str = "fp32",
    ) -> None:
        if rank < 1:
            raise ConfigError(f"dion rank {rank}: must be at least 1; nearest: 1")
        self.rank = rank
        super().__init__(params, lr, momentum, betas, eps, weight_decay, orthogonal=orthogonal, codec=codec)

    def sums(self, parts: Mapping[str, Part]) -> dict[str, Sequence[dict[str, Sum]]]:
        """First the rows of B Q go to the matrix's owner, which sends P back; then the terms of R, and R comes back."""
        found: dict[str, Sequence[dict[str, Sum]]] = {name: ({}, {}, {}, {}) for name in parts}
        for name, key, pieces, owner in matrices_of(parts):
            (rows, columns), rank, number = parts[name].shape[-2:], self._rank(parts[name]), len(pieces)
            touched = tuple((first // columns, -(-last // columns)) for first, last in pieces)
            held = tuple((0, rank if first < last else 0) for first, last in pieces)
            m, r = on_one(owner, number, rows), on_one(owner, number, rank)
            there, basis, terms, total = found[name]
            there[key], basis[key] = Sum(rank, touched, m, self.codec), Sum(rank, m, touched, self.codec)
            # The columns of R as rows, since a group of integers shares a scale.
            terms[key], total[key] = Sum(columns, held, r, self.codec), Sum(columns, r, held, self.codec, alike=True)
        return found

    def _rank(self, part: Part) -> int:
        """Columns of the factors."""
        return min(self.rank, *self.shapes.get(part.name, part.shape)[-2:])

    def num_kept(self, part: Part) -> int:
        """The momentum of each element, and the factors of each matrix of which the rank has elements."""
        first, last = _touched(part)
        return part.own[1] - part.own[0] + (last - first) * part.shape[-1] * self._rank(part)

    def _kinds(self) -> dict[str, Any]:
        return {"momentum": torch.empty(1), FACTOR: torch.empty(1)}

    def records_of(self, part: Part) -> dict[str, Record]:
        """The factors of the matrices of which a piece has elements."""
        first, last = _touched(part)
        each, stack = torch.Size([part.shape[-1], self._rank(part)]), part.shape[:-2].numel()
        return {FACTOR: Record(torch.Size([last - first, *each]), stack * each.numel(), first * each.numel())}

    def _start(self, part: Part) -> Tensor:
        """Q before the first step; of the columns of the whole that a further axis leaves here."""
        whole, columns = self.shapes.get(part.name, part.shape)[-1], part.shape[-1]
        drawn = torch.randn(whole, self._rank(part), generator=torch.Generator().manual_seed(SEED))
        return drawn[self.beyond.first_column(part.name, columns) :][:columns]

    def _across(self, param: Tensor, grad: Tensor, part: Part, group: dict[str, Any]) -> Update:
        state, (first, last) = self.state[param], _touched(part)
        if not state:
            state["momentum"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
            state[FACTOR] = self._start(part).to(param.device).expand(last - first, -1, -1).clone()
        # torch's load_state_dict gives it the parameter's dtype.
        factors = state[FACTOR] = state[FACTOR].float()
        blocks, momentum = _blocks(part), state["momentum"].add_(grad).view(-1)
        rows = {key: block.rows(momentum).float() for key, block in blocks.items()}
        q = {key: factors[int(key) - first] for key in blocks}
        sums = yield {key: rows[key] @ q[key] for key in blocks}
        p = yield {key: self.beyond.basis(part.name, sums[key]) for key in blocks if len(sums[key])}
        terms = yield {key: p[key].T @ rows[key] for key in blocks}
        r = yield {key: self.beyond.total(part.name, terms[key]) for key in blocks if len(terms[key])}
        update = torch.empty_like(momentum)
        for key, block in blocks.items():
            q[key].copy_(unit_rows(r[key], self.beyond.lengths(part.name, r[key])).T)
            momentum[block.own] -= (1 - group["momentum"]) * block.cut(p[key] @ r[key])
            update[block.own] = block.cut(p[key] @ q[key].T)
        move(param, update.view_as(param), self.shapes.get(part.name, part.shape), group)


def _touched(part: Part) -> PieceSpan:
    """The matrices of a stack of which this rank has elements."""
    (first, last), size = part.own, part.shape[-2:].numel()
    return (first // size, -(-last // size)) if first < last else (0, 0)


def _blocks(part: Part) -> dict[str, Block]:
    """What this rank has of each matrix that it touches, by its number."""
    size, columns = part.shape[-2:].numel(), part.shape[-1]
    found: dict[str, Block] = {}
    for key, pieces in pieces_of(part).items():
        first, last = pieces[part.rank]
        if first < last:
            start = int(key) * size - part.own[0]
            found[key] = Block(slice(start + first, start + last), first % columns, columns)
    return found
