"""PowerSGD: sends each gradient matrix as two thin ones, and adds the loss to the next gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.collectives.feedback import Lost
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import added
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.together import together
from thinwire.errors import ConfigError
from thinwire.layout.layout import Layout, sliced
from thinwire.layout.zeros import WEIGHTS
from thinwire.methods.options import CONTRACTION, check_types, codec_of
from thinwire.methods.plannable import Plannable, Tunable
from thinwire.methods.reduction import FP32, Bucket, Step, seed_of, sides, sum_bytes, sum_over_ranks, thin_products
from thinwire.state.memory import Merge, Place, Residual
from thinwire.table import Row

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class PowerSGD(Plannable):
    """Rank-r gradients with error feedback, in any number of buckets.

    For a gradient matrix G (n x m; further dimensions count as columns), E and Q are kept from the last step, with Q's
    columns scaled to length 1, which changes no basis:
        M  = G + E
        P  = orthonormal basis of the columns of sum_ranks M Q        n x r
        Q  = (1/P) sum_ranks M^T P                                    m x r
        E  = M - P (M^T P)^T       and P Q^T replaces G
    The first Q is drawn from the seed. Vectors travel in fp32. The experts of a layer are a stack of matrices with
    factors of their own; of other tensors all dimensions but the first count as columns.

    Raises ConfigError for a rank below 1, a start_step below 0, a min_compression below 1, and a codec that is no
    contraction.
    Source: Vogels et al., "PowerSGD", NeurIPS 2019, algorithms 1 and 2.
    """

    not_on_zero = "needs whole matrices, which zero cuts anywhere"

    rank: int = 4
    """Columns r of P and Q, at least 1; no more are used than the shorter side of the matrix."""
    start_step: int = 10
    """First step that is compressed, from 0; steps before it travel in fp32."""
    min_compression: float = 2.0
    """Compress a matrix only where (n + m) r is this many times smaller than n m, else send it in fp32; at least 1. A
    stack of matrices is compressed as a whole, or not."""
    codec: str = "fp32"
    """Codec of P and Q, such as bf16 or int8/128:bf16:nearest. Error feedback covers what it loses too."""
    find_unused_parameters: bool = False
    """DDP's own option; set it for a model that leaves out parameters in some steps."""

    def __post_init__(self) -> None:
        check_types(self)
        for option, lowest in (("rank", 1), ("start_step", 0), ("min_compression", 1)):
            value = getattr(self, option)
            if not lowest <= value < math.inf:
                raise ConfigError(f"{option} {value} of powersgd: must be at least {lowest}; nearest: {lowest}")
        codec_of(self, "codec", CONTRACTION)

    @property
    def name(self) -> str:
        return "powersgd"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (codec_of(self, "codec", CONTRACTION),)

    @property
    def settled_after(self) -> int:
        return self.start_step

    @property
    def worth_trying(self) -> Sequence[Mapping[str, Any]]:
        return {"rank": 2}, {"rank": 8}, {"rank": 16}

    def sample(self) -> Sequence[Tensor]:
        return thin_products()

    def reduction(self, place: Place, seed: int) -> LowRankMean:
        return LowRankMean(self, place, seed)

    def rank_of(self, shape: torch.Size) -> int:
        """Rank r for a gradient of this shape; 0 if it travels whole."""
        return self.rank if self.saves(shape, self.rank) else 0

    def saves(self, shape: torch.Size, rank: int) -> bool:
        """Whether factors of this rank are `min_compression` times smaller than the matrix, and so below both sides."""
        return len(shape) > 1 and rank * sum(factors(shape)) * self.min_compression < shape.numel()

    @property
    def uniform(self) -> float:
        return self.rank

    def candidates(self, shape: torch.Size, span: float) -> list[float]:
        """Ranks from rank / span to rank * span that make this shape small enough; none if it travels whole."""
        if not self.rank_of(shape):
            return []
        ranks = range(math.ceil(self.rank / span), math.floor(self.rank * span) + 1)
        return [rank for rank in ranks if self.saves(shape, rank)]

    def errors(self, x: Tensor, settings: Sequence[float]) -> list[float]:
        """|x - best approximation of that rank|: the root of the sum of the squared remaining singular values."""
        matrix = x.reshape(sides(x.shape)).double()
        gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
        ascending = torch.linalg.eigvalsh(gram).clamp_(min=0)
        lost = ascending.view(-1, ascending.shape[-1]).sum(0).cumsum(0).sqrt().tolist()
        return [lost[-1 - int(rank)] for rank in settings]

    def size(self, shape: torch.Size, setting: float) -> int:
        """Bytes of both factors, without the padding of the message."""
        num_elements = int(setting) * sum(factors(shape))
        return round(num_elements * self.codecs[0].bits_per_element / 8)


def factors(shape: torch.Size) -> tuple[int, int]:
    """Elements of P and of Q of rank 1."""
    *stack, n, m = sides(shape)
    return math.prod(stack) * n, math.prod(stack) * m


class LowRankMean(Tunable):
    """PowerSGD's reduction, with its state by parameter.

    State:
        error: E as [n, m], of this rank.
        q: Q as [m, r], the same on all ranks.

    Of a stack of matrices, both have one more dimension before these.
    """

    def __init__(self, method: PowerSGD, place: Place, seed: int) -> None:
        super().__init__(place)
        self.method = method
        (self.codec,) = method.codecs
        self.seed = seed
        self.error = self.state.add("error", Residual(), self._error_shape, row="error feedback")
        self.q = self.state.add("q", Merge.SAME, self._q_shape, row="factors")

    def _error_shape(self, name: str, shape: torch.Size) -> torch.Size | None:
        return sides(shape) if self._rank_of(name, shape) else None

    def _q_shape(self, name: str, shape: torch.Size) -> torch.Size | None:
        rank = self._rank_of(name, shape)
        if not rank:
            return None
        *stack, _, columns = sides(shape)
        return torch.Size([*stack, columns, rank])

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        is_plain = step.number < self.method.start_step
        grads = dict(zip(bucket.names, bucket.grads, strict=True))
        ranks = {name: 0 if is_plain else self._rank_of(name, grad.shape) for name, grad in grads.items()}
        whole = [grad for name, grad in grads.items() if not ranks[name]]
        thin = {name: grad for name, grad in grads.items() if ranks[name]}
        with link.timed("encode_s", "gradients"):
            matrices = {name: self._matrix(name, grad) for name, grad in thin.items()}
            if self.watch:
                for name, matrix in matrices.items():
                    self.watch(name, matrix)
            # Encode column by column, since a group of integers shares a scale.
            p_own = [(matrix @ self._q(name, matrix.shape, ranks[name])).mT for name, matrix in matrices.items()]
        sums, p_sums = yield from together(
            sum_over_ranks(link.part(0), whole), sum_over_ranks(link.part(1), p_own, self.codec)
        )
        with link.timed("encode_s", "gradients"):
            # Householder reflections give r columns even if a column is zero or dependent on others.
            bases = [torch.linalg.qr(p_sum.mT).Q for p_sum in p_sums]
            q_own = [basis.mT @ matrix for matrix, basis in zip(matrices.values(), bases, strict=True)]
        lost = self._lost(link.topology, q_own)
        q_sums = yield from sum_over_ranks(link.part(2), q_own, self.codec, lost)
        with link.timed("decode_s", "gradients"):
            for grad, total in zip(whole, sums, strict=True):
                grad.copy_(total).div_(link.topology.world_size)
            sent = q_own if lost is None else self._less(q_own, lost, link)
            for name, basis, q_sent, q_sum in zip(thin, bases, sent, q_sums, strict=True):
                self.error[name] = matrices[name].sub_(basis @ q_sent)
                self.q[name] = q_sum.div_(link.topology.world_size).mT.contiguous()
                thin[name].copy_((basis @ q_sum).view(thin[name].shape))

    def _matrix(self, name: str, grad: Tensor) -> Tensor:
        """M = G + E, in its own memory, so that matrix products do not depend on the gradient's place in a bucket."""
        return self.error[name] + grad.reshape(sides(grad.shape))

    def _rank_of(self, name: str, shape: torch.Size) -> int:
        return int(self.settings.get(name, self.method.rank_of(shape)))

    def _q(self, name: str, shape: torch.Size, rank: int) -> Tensor:
        """Q of the last step, random in the first. A smaller rank drops the last columns, a larger one adds columns."""
        held = self.q.get(name)
        if held is not None:
            # Scaling does not change the basis, and columns of one size are rounded alike.
            held = held / held.norm(dim=-2, keepdim=True).clamp_min(TINY)
            if held.shape[-1] >= rank:
                return held[..., :rank]
        generator = torch.Generator().manual_seed(seed_of(self.seed, 0, name) >> 1)
        *stack, _, num_columns = shape
        fresh = torch.randn(*stack, num_columns, rank, generator=generator)
        return fresh if held is None else torch.cat([held, fresh[..., held.shape[-1] :]], dim=-1)

    def _lost(self, grid: Topology, q_own: list[Tensor]) -> Lost | None:
        return None if self.codec.traits.lossless else Lost.zeros(grid, self._slices(q_own, grid.world_size).width)

    def _less(self, q_own: list[Tensor], lost: Lost, link: Link) -> list[Tensor]:
        """This rank's share of Q in the sum: its part minus the codecs' losses on this rank."""
        lost_here = self._slices(q_own, link.topology.world_size).unpack(lost.by_slices(link.topology, link.rank))
        return [q - loss.view(q.shape) for q, loss in zip(q_own, lost_here, strict=True)]

    def _slices(self, q_own: list[Tensor], world_size: int) -> Layout:
        return sliced((q.numel() for q in q_own), world_size, self.codec)

    def sent_bytes(self) -> dict[str, int]:
        shapes, grid = self.place.shapes, self.place.grid
        ranks = {name: self._rank_of(name, shape) for name, shape in shapes.items()}
        thin = [(ranks[name], shape) for name, shape in shapes.items() if ranks[name]]
        messages = (
            ([shape.numel() for name, shape in shapes.items() if not ranks[name]], FP32),
            ([rank * factors(shape)[0] for rank, shape in thin], self.codec),
            ([rank * factors(shape)[1] for rank, shape in thin], self.codec),
        )
        return added(*(sum_bytes(numels, grid, codec) for numels, codec in messages))

    def rows(self) -> list[Row]:
        method, shapes = self.method, self.place.shapes
        num_thin = sum(method.rank_of(shape) > 0 for shape in shapes.values())
        held = sum(self.state.kept_bytes().values())
        num_stacks = sum(method.rank_of(shape) > 0 and len(sides(shape)) == 3 for shape in shapes.values())
        stacks = f" ({num_stacks} of them stacks of matrices)" if num_stacks else ""
        effect = f"{num_thin} of {len(shapes)} as factors of rank {method.rank} in {method.codec}{stacks}, "
        return [
            *self._warnings(num_thin),
            ("gradients", f"{effect}the others in fp32", f"factors must be {method.min_compression:g} times smaller"),
            ("steps in fp32", f"the first {method.start_step}", "start_step"),
            ("state of the method", f"{held / 1e6:.3f} MB a rank", "error and Q, in fp32"),
            (WEIGHTS, "change, outside of whole rows and columns", "a product of factors is zero only there"),
        ]

    def _warnings(self, num_thin: int) -> list[Row]:
        if num_thin or not self.place.shapes:
            return []
        method, shapes = self.method, self.place.shapes.values()
        longest = max(max(shape, default=1) for shape in shapes)
        ranks = range(1, min(method.rank, longest))
        fitting = [rank for rank in ranks if any(method.saves(shape, rank) for shape in shapes)]
        why = f"nearest: rank {fitting[-1]}" if fitting else "no matrix is large enough"
        limit = f"factors of rank {method.rank} make none {method.min_compression:g} times smaller"
        return [("WARNING", "nothing is compressed: all gradients travel in fp32", f"{limit}; {why}")]
