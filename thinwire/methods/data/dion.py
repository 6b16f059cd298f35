"""Dion: orthonormal updates from each rank's own momentum, sent as two thin factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec
from thinwire.collectives.feedback import Lost
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import added
from thinwire.collectives.rounds import Rounds
from thinwire.collectives.together import together
from thinwire.errors import ConfigError
from thinwire.layout.layout import Layout, sliced
from thinwire.layout.zeros import WEIGHTS
from thinwire.methods.ddp import DDPMethod, check_plain_sgd
from thinwire.methods.options import FIXED_SIZE, check_types, codec_of
from thinwire.methods.reduction import (
    FP32,
    OPERATION,
    Bucket,
    Reduction,
    Step,
    is_large_matrix,
    seed_of,
    sides,
    sum_bytes,
    sum_over_ranks,
    thin_products,
)
from thinwire.optim.dion import unit_rows
from thinwire.state.memory import MeanMerge, Merge, Place
from thinwire.table import Row

# Lion's b1 and b2. Its update of vectors, sign(b1 m + (1 - b1) g), is as large as an orthonormal one.
BETA1, BETA2 = 0.95, 0.98


@dataclass(frozen=True)
class Dion(DDPMethod):
    """Muon's update at rank r, in r (m + n) numbers a matrix in place of m n.

    For a matrix of gradient G_i on rank i (m x n), its momentum M_i, and Q of the last step:

        B_i = M_i + G_i
        P   = orthonormal basis of the columns of mean B_i Q      m x r
        R_i = B_i^T P;  R = mean R_i                              n x r
        M_i <- B_i - (1 - mu) P R_i^T                             what is not sent stays: error feedback
        Q   <- R, its columns scaled to length 1
        w   <- w - lr sqrt(m / n) P Q^T

    The mean of all M_i is the momentum that one process would have. Columns of R that are rounding beside the longest,
    below 1e-5 of it, count as that long. The experts of a layer are a stack of matrices; of other tensors all but the
    first dimension count as columns. Vectors and tensors under 256 elements take the update of Lion with their mean
    gradient. Takes SGD without momentum; clipping has no effect.

    Raises ConfigError for values out of range, and for a codec of variable length.
    Source: Ahn, Xu, Abreu and Langford, "Dion: Distributed orthonormalized updates" (2025), algorithms 1 and 3; Lion:
    Chen et al., "Symbolic discovery of optimization algorithms" (NeurIPS 2023).
    """

    optimizers: ClassVar[tuple[str, ...]] = ("sgd-plain",)
    optimizers_reason: ClassVar[str] = "keeps the momentum itself and gives orthonormal updates"
    not_on_zero: ClassVar[str] = "needs whole matrices and each rank's own gradient, while zero knows slices of the sum"
    not_on_mesh: ClassVar[str] = "makes whole matrices orthonormal, of which a tensor axis has parts"
    find_unused_parameters: ClassVar[bool] = False
    # Orthonormal updates can't be clipped, and a world of one also uses them.
    whole_step: ClassVar[bool] = True
    name: ClassVar[str] = "dion"

    rank: int = 16
    """Columns r of P and R, at least 1; no more are used than the shorter side of the matrix."""
    momentum: float = 0.95
    """mu, from 0 to below 1."""
    codec: str = "fp32"
    """Codec of P and R; see `thinwire codecs`. What it loses of R stays in the momentum."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.rank < 1:
            raise ConfigError(f"rank {self.rank} of dion: must be at least 1; nearest: 1")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum {self.momentum} of dion: must be at least 0 and below 1; the usual: 0.95")
        self.make()

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (self.make(),)

    @property
    def worth_trying(self) -> Sequence[Mapping[str, Any]]:
        return {"rank": 8}, {"rank": 32}, {"rank": 64}

    def make(self) -> Codec:
        """The codec of the factors."""
        return codec_of(self, "codec", FIXED_SIZE)

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        check_plain_sgd(self.name, "orthonormal updates", optimizer)

    def rank_of(self, shape: torch.Size) -> int:
        """Rank r for a gradient of this shape; 0 if it travels whole."""
        return min(self.rank, *sides(shape)[-2:]) if is_large_matrix(shape) else 0

    def sample(self) -> Sequence[Tensor]:
        return thin_products()

    def reduction(self, place: Place, seed: int) -> Reduction:
        return Orthonormal(self, place, seed)


class Orthonormal(Reduction):
    """Dion's reduction, with its state by parameter.

    If a rank's gradient is not finite in a step, the parameter's state does not change on any rank.

    State:
        momentum: M_i [m, n], of this rank.
        q: [n, r].
        lion: momentum of vectors.
    """

    def __init__(self, method: Dion, place: Place, seed: int) -> None:
        super().__init__(place)
        self.method, self.codec, self.seed = method, method.make(), seed
        self.momentum = self.state.add(
            "momentum", MeanMerge("orthonormal momenta"), self._momentum_shape, row="momentum"
        )
        self.q = self.state.add("q", Merge.SAME, self._q_shape, row="factors")
        self.lion = self.state.add("lion", Merge.SAME, self._lion_shape, row="momentum")

    def _momentum_shape(self, name: str, shape: torch.Size) -> torch.Size | None:
        return sides(shape) if self.method.rank_of(shape) else None

    def _q_shape(self, name: str, shape: torch.Size) -> torch.Size | None:
        rank = self.method.rank_of(shape)
        return torch.Size([*sides(shape)[:-2], sides(shape)[-1], rank]) if rank else None

    def _lion_shape(self, name: str, shape: torch.Size) -> torch.Size | None:
        return None if self.method.rank_of(shape) else shape

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        grads = dict(zip(bucket.names, bucket.grads, strict=True))
        thin = {name: grad for name, grad in grads.items() if self.method.rank_of(grad.shape)}
        whole = {name: grad for name, grad in grads.items() if name not in thin}
        world_size = link.topology.world_size
        with link.timed("encode_s", OPERATION):
            fresh = {name: self.momentum[name] + grad.reshape(sides(grad.shape)) for name, grad in thin.items()}
            # Encode column by column, since a group of integers shares a scale.
            p_own = [(matrix @ self._q(name, grads[name].shape)).mT for name, matrix in fresh.items()]
        sums, p_sums = yield from together(
            sum_over_ranks(link.part(0), list(whole.values())), sum_over_ranks(link.part(1), p_own, self.codec)
        )
        with link.timed("encode_s", OPERATION):
            bases = [torch.linalg.qr(p_sum.mT).Q for p_sum in p_sums]
            r_own = [basis.mT @ matrix for matrix, basis in zip(fresh.values(), bases, strict=True)]
        lost = self._lost(r_own, world_size)
        r_sums = yield from sum_over_ranks(link.part(2), r_own, self.codec, lost)
        with link.timed("decode_s", OPERATION):
            for (name, grad), total in zip(whole.items(), sums, strict=True):
                self._step_lion(name, grad, total.div_(world_size))
            sent = r_own if lost is None else self._less(r_own, lost, link)
            for (name, grad), basis, own, r_sum in zip(thin.items(), bases, sent, r_sums, strict=True):
                rows, columns = sides(grad.shape)[-2:]
                q = unit_rows(r_sum, r_sum.norm(dim=-1)).mT
                grad.copy_((math.sqrt(rows / columns) * (basis @ q.mT)).view(grad.shape))
                # If a gradient is not finite, P and Q are not finite either, on all ranks.
                if torch.isfinite(grad).all():
                    self.momentum[name] = fresh[name].sub_(basis @ own, alpha=1 - self.method.momentum)
                    self.q[name] = q.contiguous()

    def _step_lion(self, name: str, grad: Tensor, mean: Tensor) -> None:
        """Replace the gradient by Lion's update."""
        held = self.lion[name]
        direction = held.lerp(mean, 1 - BETA1)
        # torch's sign of NaN is 0, which would hide the damage.
        grad.copy_(direction.sign().add_(direction, alpha=0.0))
        if torch.isfinite(direction).all():
            held.lerp_(mean, 1 - BETA2)

    def _q(self, name: str, shape: torch.Size) -> Tensor:
        """Q of the last step, random in the first."""
        if (held := self.q.get(name)) is not None:
            return held
        generator = torch.Generator().manual_seed(seed_of(self.seed, 0, name) >> 1)
        *stack, _, columns = sides(shape)
        return torch.randn(*stack, columns, self.method.rank_of(shape), generator=generator)

    def _lost(self, r_own: list[Tensor], world_size: int) -> Lost | None:
        if self.codec.traits.lossless:
            return None
        return Lost.zeros(self.place.grid, self._slices(r_own, world_size).width)

    def _less(self, r_own: list[Tensor], lost: Lost, link: Link) -> list[Tensor]:
        """This rank's share of R in the sum: its part minus the codecs' losses on this rank."""
        lost_here = self._slices(r_own, link.topology.world_size).unpack(lost.by_slices(link.topology, link.rank))
        return [r - loss.view(r.shape) for r, loss in zip(r_own, lost_here, strict=True)]

    def _slices(self, r_own: list[Tensor], world_size: int) -> Layout:
        return sliced((r.numel() for r in r_own), world_size, self.codec)

    def sent_bytes(self) -> dict[str, int]:
        shapes, grid = self.place.shapes.values(), self.place.grid
        thin = [(self.method.rank_of(shape), sides(shape)) for shape in shapes if self.method.rank_of(shape)]
        messages = (
            ([shape.numel() for shape in shapes if not self.method.rank_of(shape)], FP32),
            *(([rank * size.numel() // size[side] for rank, size in thin], self.codec) for side in (-1, -2)),
        )
        return added(*(sum_bytes(numels, grid, codec) for numels, codec in messages))

    def rows(self) -> list[Row]:
        method, shapes = self.method, self.place.shapes
        num_thin = sum(method.rank_of(shape) > 0 for shape in shapes.values())
        effect = f"{num_thin} of {len(shapes)} as factors of rank {method.rank} in {self.codec}, the others in fp32"
        held = f"{sum(self.state.kept_bytes().values()) / 1e6:.3f} MB a rank"
        return [
            ("gradients", effect, "of each rank's own momentum"),
            ("update", "orthonormal at that rank, signs for vectors", "its size is the learning rate: that of Muon"),
            ("state of the method", held, "momentum and Q, in fp32"),
            # Orthonormal factors are computed to the precision of fp32, and not exactly.
            (WEIGHTS, "change", "the product of the factors is hardly ever exactly zero"),
        ]
