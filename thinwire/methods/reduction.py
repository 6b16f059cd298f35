"""Reductions of gradient buckets to their mean over the ranks, as communication jobs; base of all reductions."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity, derive_seed
from thinwire.collectives import Topology
from thinwire.collectives.feedback import Lost
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import all_reduce, all_reduce_bytes
from thinwire.collectives.rounds import Rounds
from thinwire.layout.layout import sliced
from thinwire.optim.matrices import is_stack
from thinwire.state.memory import Place, State
from thinwire.table import Row

FP32 = Identity()
FP32_BYTES = 4
OPERATION = "gradients"
# Smaller tensors are not worth a codec.
MIN_ELEMENTS = 256


@dataclass(frozen=True)
class Bucket:
    """The content of a GradBucket, for use after DDP's hook has returned.

    Args:
        names: names of the parameters.
        grads: their gradients, views into `flat`, fp32.
    """

    number: int
    names: list[str]
    flat: Tensor
    grads: list[Tensor]
    last: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.grads

    def is_last(self) -> bool:
        return self.last


@dataclass(frozen=True)
class Step:
    """The step that a bucket belongs to. lrs: learning rates by parameter name, empty if no optimizer is known."""

    number: int
    lrs: Mapping[str, float]


class Reduction(ABC):
    """A way to average buckets. State between steps is in `state`, by parameter name, because buckets may change.

    is_metered: whether messages are counted as they are sent; otherwise a ring's formula counts them.
    """

    is_metered = True

    def __init__(self, place: Place) -> None:
        self.place = place
        self.state = State(place)

    @abstractmethod
    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        """Overwrite the bucket with the mean over ranks, the same bits on all of them; a communication job."""

    @abstractmethod
    def sent_bytes(self) -> dict[str, int]:
        """Payload bytes of a rank in a step, by level, after any warm-up of the method."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """Rows of (asked for, in effect, why)."""


def seed_of(seed: int, step: int, name: str) -> int:
    """A seed for one parameter in one step, shared by all ranks, whatever bucket the parameter is in."""
    return derive_seed(seed, step, zlib.crc32(name.encode()))


def is_large_matrix(shape: torch.Size) -> bool:
    """Whether a gradient of this shape is worth compressing. Norms, biases and tiny tensors travel in fp32."""
    return len(shape) >= 2 and shape.numel() >= MIN_ELEMENTS


def sides(shape: torch.Size) -> torch.Size:
    """Rows and columns of a tensor as a matrix, whose further dimensions are columns; a vector is one row.

    A stack of matrices, such as a layer's experts, stays as it is; see `is_stack`.
    """
    if is_stack(shape):
        return shape
    return torch.Size([shape[0] if len(shape) > 1 else 1, math.prod(shape[1:] if len(shape) > 1 else shape)])


def thin_products() -> tuple[Tensor, Tensor]:
    """A basis and a product of fixed matrices, as methods of thin factors compute them."""
    thin, matrix = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((96, 8), (96, 64)))
    basis = torch.linalg.qr(thin).Q
    return basis.contiguous(), basis @ (basis.mT @ matrix)


def sum_over_ranks(
    link: Link, tensors: Sequence[Tensor], codec: Codec = FP32, lost: Lost | None = None
) -> Rounds[list[Tensor]]:
    """The sums of tensors of any shapes, fp32 in their shapes, in one message a hop, each in `codec`; see `sliced`."""
    if not tensors:
        return []
    slices = sliced((tensor.numel() for tensor in tensors), link.topology.world_size, codec)
    message = slices.pack(tensors, torch.empty(slices.rows, slices.width))
    total = yield from all_reduce(link, message, codec, codec, codec, operation=OPERATION, lost=lost)
    return [whole.view(tensor.shape) for whole, tensor in zip(slices.unpack(total), tensors, strict=True)]


def sum_bytes(numels: Iterable[int], grid: Topology, codec: Codec) -> dict[str, int]:
    """Payload of a rank in `sum_over_ranks` of tensors of `numels` elements, by level."""
    return all_reduce_bytes(sliced(numels, grid.world_size, codec).numel, grid, codec, codec, codec)
