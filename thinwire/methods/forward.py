"""Base of the methods that use forward passes only: samples of the gradient, one byte each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.collectives.gather import gather_bytes
from thinwire.methods.interface import Method, MethodPlan, trained_shapes
from thinwire.optim import GENERAL

# Besides its samples a rank sends its loss, fp32, and whether it was asked to stop.
STATUS_BYTES = 5


class ForwardMethod(Method, ABC):
    """A method that estimates the gradient from losses along random directions. No tensor travels.

    Args:
        samples: samples of each rank in one step.
        eps: distance from the weights to each of the two points that a sample compares.
        cap: the largest absolute slope that is applied.
        check_every: steps between comparisons of the replicas, 0: never.
        log: file of the SlopeLog that the first rank keeps; empty: none.
    """

    name: ClassVar[str]
    optimizers: ClassVar[tuple[str, ...]] = GENERAL
    optimizers_reason: ClassVar[str] = "gives its estimate of the gradient to a common optimizer"
    shards_optimizer: ClassVar[bool] = False
    cpu_only: ClassVar[bool] = True
    not_inside_islands: ClassVar[str] = "keeps a log of all updates, which would lack those of the outer steps"
    not_on_mesh: ClassVar[str] = "draws directions of the whole model on every rank"

    samples: int
    eps: float
    cap: float
    check_every: int
    log: str

    @abstractmethod
    def factor(self, num_samples: int) -> float:
        """Factor by which the sum over `num_samples` samples is multiplied."""

    @property
    def not_measured(self) -> str:
        """See Method."""
        return "keeps a log of every step, and measured ones are not of the run" if self.log else ""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """No codecs: the bytes are no tensor."""
        return ()

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """Perturbed weights, and after them the estimate, take the memory of the gradients."""
        whole = sum(4 * shape.numel() for shape in trained_shapes(model).values())
        words = gather_bytes(topology, self.samples + STATUS_BYTES)
        return MethodPlan(
            weights=whole,
            gradients=whole,
            optimizer=2 * whole,
            sent={("all_gather_exact", level): sent for level, sent in words.items()},
        )
