"""What the methods on forward passes alone share: samples of the gradient, one byte for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.collectives.gather import gather_bytes
from thinwire.methods.interface import MethodPlan, trained_shapes
from thinwire.optim import GENERAL

# Beside its samples a rank says its loss, fp32, and whether it wishes to stop.
WORD_BYTES = 5


class ForwardMethod(ABC):
    """A method that estimates the gradient from losses along random directions, of which no tensor travels.

    samples: of each rank in one step. eps: from the weights to each of the two that a sample compares. cap: the largest
    absolute slope that is applied. check_every: steps between comparisons of the replicas, 0: never. log: the file of
    the SlopeLog that the first rank keeps; empty: none.
    """

    name: ClassVar[str]
    settled_after: ClassVar[int] = 0
    optimizers: ClassVar[tuple[str, ...]] = GENERAL
    optimizers_reason: ClassVar[str] = "hands its estimate of the gradient to one that is usual"
    shards_optimizer: ClassVar[bool] = False
    cpu_only: ClassVar[bool] = True
    not_inside_islands: ClassVar[str] = "keeps a log of all that was applied, which exchanges would not be in"
    not_on_mesh: ClassVar[str] = "draws directions of the whole model on every rank"

    samples: int
    eps: float
    cap: float
    check_every: int
    log: str

    @abstractmethod
    def factor(self, num_samples: int) -> float:
        """What the sum over this many samples is multiplied by."""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """None: the bytes are no tensor."""
        return ()

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """Perturbed weights and, after them, the estimate take the place of the gradients."""
        whole = sum(4 * shape.numel() for shape in trained_shapes(model).values())
        words = gather_bytes(topology, self.samples + WORD_BYTES)
        return MethodPlan(
            weights=whole,
            gradients=whole,
            optimizer=2 * whole,
            sent={("all_gather_exact", level): sent for level, sent in words.items()},
        )
