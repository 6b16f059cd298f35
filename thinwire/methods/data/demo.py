"""DeMo: each rank sends the fastest-moving part of its own momentum and keeps the rest."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, TopK, derive_seed
from thinwire.codecs.cosines import How, from_coefficients, to_coefficients
from thinwire.collectives.gather import all_gather_packets, gather_bytes
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.layout.zeros import WEIGHTS
from thinwire.methods.ddp import DDPMethod, check_plain_sgd
from thinwire.methods.options import CONTRACTION, check_types, codec_of
from thinwire.methods.reduction import OPERATION, Bucket, Reduction, Step, seed_of, sides
from thinwire.state.memory import MeanMerge, Place
from thinwire.table import Row

LARGEST_CHUNK = 4096


@dataclass(frozen=True)
class DeMo(DDPMethod):
    """Momentum that is never averaged: each rank sends the largest cosine coefficients of its own momentum.

        m <- beta m + g                       m is this rank's momentum and drifts from the others'
        q  = the largest of DCT(m), block by block
        m <- m - IDCT(q)                      remove what was sent: the momentum is its own error feedback
        w <- w - lr sign(IDCT(mean over ranks of q))

    The experts of a layer are a stack of matrices; of other tensors all dimensions but the first count as columns. The
    update's size does not depend on the gradients', so clipping has no effect. Takes SGD without momentum.

    Raises ConfigError for values out of range.
    Source: Peng, Quesnelle and Kingma, "Decoupled Momentum Optimization" (2024), algorithm 1.
    """

    optimizers: ClassVar[tuple[str, ...]] = ("sgd-plain",)
    optimizers_reason: ClassVar[str] = "keeps the momentum itself and gives signs"
    not_on_zero: ClassVar[str] = "needs a momentum of every rank's own gradient, while zero knows only the sum"
    find_unused_parameters: ClassVar[bool] = False
    # Signs can't be clipped, and a world of one also uses them.
    whole_step: ClassVar[bool] = True
    name: ClassVar[str] = "demo"

    beta: float = 0.999
    """Decay of the momentum in one step; from 0 to below 1."""
    density: float = 1 / 128
    """Share of a block's coefficients that travels; from 1 / chunk^2 to 1."""
    chunk: int = 64
    """Side of a block of a matrix, or length of a block of a vector, in elements; from 1 to 4096. Where it does not
    divide a side, the largest divisor below it takes its place."""
    values: str = "bf16"
    """Codec of the coefficients that travel, such as fp32, bf16 or, for one bit each, sign/32:bf16. What it loses stays
    in the momentum."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.beta < 1:
            raise ConfigError(f"beta {self.beta} of demo: must be at least 0 and below 1; the usual: 0.999")
        if not 1 <= self.chunk <= LARGEST_CHUNK:
            possible = min(max(self.chunk, 1), LARGEST_CHUNK)
            raise ConfigError(
                f"chunk {self.chunk} of demo: must be from 1 to {LARGEST_CHUNK}; nearest: {possible}, the usual: 64"
            )
        least = 1 / self.chunk**2
        # Printed with six digits, the least may be a little below.
        if not least * (1 - 1e-5) <= self.density <= 1:
            larger = math.ceil(self.density**-0.5) if 0 < self.density < 1 else math.inf
            nearest = "1" if self.density > 1 else f"{least:.6g}"
            what = f"density {self.density} of demo:"
            if self.density == type(self).density:
                what, nearest = (
                    f"chunk {self.chunk} of demo: density {self.density}, the default,",
                    f"density {nearest}",
                )
            nearest += f", or chunk {larger}" if larger <= LARGEST_CHUNK else ""
            raise ConfigError(
                f"{what} must be from 1 / chunk^2, {least:.6g} for chunk {self.chunk}, to 1; nearest: {nearest}"
            )
        self.codec(self.chunk * self.chunk)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (self.codec(self.chunk * self.chunk),)

    def codec(self, block: int) -> TopK:
        """Codec that selects and packs the coefficients of blocks of `block` elements, at least one per block."""
        return TopK(max(self.density, 1 / block), block, codec_of(self, "values", CONTRACTION))

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        check_plain_sgd(self.name, "signs", optimizer)

    def sample(self) -> Sequence[Tensor]:
        x = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
        return (from_blocks(to_blocks(x, self.chunk, torch.empty(x.numel())), torch.empty(x.shape)),)

    def warm(self) -> None:
        """See Method: the transforms."""
        self.sample()

    def reduction(self, place: Place, seed: int) -> Reduction:
        return SignMean(self, place, seed)


class SignMean(Reduction):
    """The sign of the mean over ranks of the coefficients that DeMo sends. State: `momentum`, m, of this rank alone."""

    def __init__(self, method: DeMo, place: Place, seed: int) -> None:
        super().__init__(place)
        self.method, self.seed = method, seed
        self.momentum = self.state.add("momentum", MeanMerge("decoupled momenta"), row="momentum")

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        grads = dict(zip(bucket.names, bucket.grads, strict=True))
        sizes = [self._packet_bytes(grad.shape) for grad in bucket.grads]
        message = torch.empty(sum(sizes), dtype=torch.uint8)
        held = {name: self.momentum[name] for name in grads}
        fresh = {name: torch.add(grad, held[name], alpha=self.method.beta).contiguous() for name, grad in grads.items()}
        # One parameter after another uses it, so that it stays in cache.
        work = link.scratch("blocks", max(grad.numel() for grad in bucket.grads), dtype=torch.float32)
        with link.timed("encode_s", OPERATION):
            for (name, momentum), packet in zip(fresh.items(), message.split(sizes), strict=True):
                codec, flat = codec_of_shape(self.method, momentum.shape), work[: momentum.numel()]
                blocks = to_blocks(momentum, self.method.chunk, flat)
                codec.encode(flat, seed=derive_seed(seed_of(self.seed, step.number, name), link.rank), out=packet)
                codec.decode(packet, flat.numel(), out=flat)
                from_blocks(blocks, momentum, how="subtract")
        gathered = yield from all_gather_packets(link, message, OPERATION)
        with link.timed("decode_s", OPERATION):
            packets = gathered.flatten(0, 1).split(sizes, dim=-1)
            for grad, parts in zip(grads.values(), packets, strict=True):
                codec, total = codec_of_shape(self.method, grad.shape), work[: grad.numel()]
                codec.decode_sum(parts.unbind(), total.zero_(), add=True)
                blocks = total.view(-1, *block_sides(grad.shape, self.method.chunk)[::-1])
                update = grad if grad.is_contiguous() else grad.contiguous()
                from_blocks(blocks, update, how="sign")
                if update is not grad:
                    grad.copy_(update)
        for name, momentum in fresh.items():
            self.momentum[name] = momentum

    def _packet_bytes(self, shape: torch.Size) -> int:
        return codec_of_shape(self.method, shape).packet_bytes(shape.numel())

    def sent_bytes(self) -> dict[str, int]:
        return gather_bytes(self.place.grid, sum(map(self._packet_bytes, self.place.shapes.values())))

    def rows(self) -> list[Row]:
        method = self.method
        effect = (
            f"the largest {method.density:g} of the cosine coefficients of each rank's momentum, as {method.values}"
        )
        return [
            ("gradients", effect, f"blocks of {method.chunk} a side, every rank's packets to all"),
            ("update", "the sign of their mean", "its size is the learning rate: that of Signum, not that of AdamW"),
            (WEIGHTS, "change, outside of whole blocks", "a cosine covers all of its block"),
        ]


@functools.cache
def codec_of_shape(method: DeMo, shape: torch.Size) -> TopK:
    """The codec of a tensor of this shape; kept, since making one reads its text and checks its options."""
    return method.codec(math.prod(block_sides(shape, method.chunk)))


@functools.cache
def block_sides(shape: torch.Size, chunk: int) -> tuple[int, int]:
    """Rows and columns of a block: the largest divisors of a matrix's sides up to `chunk`."""
    whole = sides(shape)[-2:]
    rows, columns = (next((size for size in range(min(chunk, side), 0, -1) if side % size == 0), 1) for side in whole)
    return rows, columns


def to_blocks(x: Tensor, chunk: int, out: Tensor) -> Tensor:
    """out = the orthonormal DCT of each block: fp32 [blocks, columns, rows], those of stacks one after another."""
    return to_coefficients(x.contiguous(), block_sides(x.shape, chunk), sides(x.shape)[-1], out)


def from_blocks(blocks: Tensor, out: Tensor, *, how: How = "set") -> Tensor:
    """See `from_coefficients`; out: contiguous."""
    return from_coefficients(blocks, out, sides(out.shape)[-1], how=how)
