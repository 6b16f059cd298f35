"""Low rank: each block of elements, taken as a matrix, travels as two thin factors that are computed anew."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.codecs import backends, checks
from thinwire.codecs.base import Codec, Traits
from thinwire.codecs.normals import normals
from thinwire.codecs.random import derive_seed
from thinwire.errors import ConfigError

SMALLEST = 2.0**-100
PROJECTION = 3  # part of the projection's seed


@dataclass(frozen=True)
class LowRank(Codec):
    """Blocks of rows x columns elements, X = P Q^T of rank r, with P an orthonormal basis of X G and Q = X^T P.

    G, [columns, r], is normal and drawn from the seed, the same for all blocks: no memory, no message in between.
    C(X) = P P^T X is a projection, |X - C(X)|^2 = |X|^2 - |Q|^2, with E|Q|^2 >= r / min(rows, columns) |X|^2; a block
    of rank r or less comes out as it was, up to rounding. The codec knows a flat tensor only: for blocks that are whole
    rows of a matrix, give the matrix's row length as `columns`. A tail shorter than a block travels in fp32. Sums are
    taken in a fixed order, so that the way a tensor is cut changes no bit. A block with a NaN or inf decodes to NaN;
    one with max|x| below 2^-100 to zeros. Raises ConfigError for factors that are no smaller than their block.

    Packet: [P of block 0, Q of block 0, P of block 1, ...] [tail], all fp32.
    Source: Halko, Martinsson and Tropp, "Finding structure with randomness" (2011), algorithm 4.1; as the first round
    of PowerSGD (NeurIPS 2019), which goes on from the last step's Q.
    """

    rank: int = 4
    rows: int = 64
    columns: int = 64

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            checks.whole_number(f"lowrank {name}", getattr(self, name), 2, 1 << 16)
        most = (self.rows * self.columns - 1) // (self.rows + self.columns)
        if not 1 <= self.rank <= most:
            raise ConfigError(
                f"lowrank rank {self.rank}: factors of {self.rows} x {self.columns} must be smaller than the block; "
                f"nearest is {min(max(self.rank, 1), most)}" + ("" if most else ", of larger blocks")
            )

    def __str__(self) -> str:
        return f"rank {self.rank} of blocks of {self.rows} x {self.columns}"

    @property
    def traits(self) -> Traits:
        """delta = r / min(rows, columns): the mean share of a random subspace, which X G finds at least."""
        return Traits(contraction=True)

    @property
    def block(self) -> int:
        return self.rows * self.columns

    @property
    def _factor_elements(self) -> int:
        """Elements of both factors of a block."""
        return self.rank * (self.rows + self.columns)

    @property
    def bits_per_element(self) -> float:
        return 32 * self._factor_elements / self.block

    def packet_bytes(self, num_elements: int) -> int:
        num_blocks, tail = divmod(num_elements, self.block)
        return 4 * (num_blocks * self._factor_elements + tail)

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        flat = backends.flat_fp32(x)
        out = backends.packet_buffer(out, self.packet_bytes(flat.numel()), flat.device)
        whole = flat.numel() // self.block * self.block
        blocks = flat[:whole].view(-1, self.rows, self.columns)
        drawn = normals(derive_seed(seed, PROJECTION), 0, self.columns * self.rank, flat.device)
        p, q = _factors(blocks, drawn.view(self.columns, self.rank))
        packet = torch.cat([torch.cat([p.flatten(1), q.flatten(1)], dim=1).view(-1), flat[whole:]])
        out.copy_(packet.view(torch.uint8))
        return out

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(num_elements, dtype=torch.float32, device=packet.device)
        backends.check_buffers(packet, self.packet_bytes(num_elements), out, num_elements)
        values = packet.clone().view(torch.float32)
        tail = num_elements % self.block
        p, q = (
            factor.unflatten(1, (-1, self.rank))
            for factor in values[: values.numel() - tail]
            .view(-1, self._factor_elements)
            .split([self.rank * self.rows, self.rank * self.columns], dim=1)
        )
        blocks = _product(p, q.transpose(1, 2))
        out[: num_elements - tail].copy_(backends.one_nan_(blocks).view(-1))
        out[num_elements - tail :].copy_(values[values.numel() - tail :])
        return out


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for [..., n, k] and [..., k, m], each sum in the order of its terms: a library's depends on the shapes."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = a.new_zeros(*batch, a.shape[-2], b.shape[-1])
    for i in range(a.shape[-1]):
        total += a[..., :, i : i + 1] * b[..., i : i + 1, :]
    return total


def _factors(blocks: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """(P, Q), [blocks, rows, r] and [blocks, columns, r], with P Q^T near each block."""
    scales = blocks.abs().amax((1, 2), keepdim=True)
    is_zero = scales < SMALLEST
    unit = torch.where(is_zero, 0.0, blocks / scales.masked_fill(is_zero, 1.0))
    basis = _orthonormal(_product(unit, projection))
    return basis, _product(unit.transpose(1, 2), basis) * scales.masked_fill(is_zero, 0.0)


def _orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span those of each [n, r], zeros where nothing is left of one."""
    basis = torch.zeros_like(columns)
    for k in range(columns.shape[-1]):
        column = columns[..., k : k + 1]
        # Once leaves what rounding made of the rest in the direction of the others.
        for _ in range(2):
            column = column - _product(basis[..., :k], _product(basis[..., :k].transpose(-1, -2), column))
        norm = _norm(column)
        basis[..., k : k + 1] = column / norm.masked_fill(norm == 0, 1.0)
    return basis


def _norm(column: Tensor) -> Tensor:
    """The 2-norm of [..., n, 1], halves of the squares added to halves."""
    squares = column.square()
    squares = pad(squares, (0, 0, 0, (1 << math.ceil(math.log2(squares.shape[-2]))) - squares.shape[-2]))
    while squares.shape[-2] > 1:
        first, second = squares.chunk(2, dim=-2)
        squares = first + second
    return squares.sqrt()
