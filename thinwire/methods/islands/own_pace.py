"""What methods without a step in common share: every rank is an island, and takes steps when it can."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.methods.interface import MethodPlan, trained_shapes
from thinwire.methods.islands.front import Front
from thinwire.optim import GENERAL


class OwnPaceMethod(Front):
    """What makes the options of such a method a Method. num_vectors: kept beside the model, in fp32 on the CPU."""

    name: ClassVar[str]
    settled_after: ClassVar[int] = 0
    shards_optimizer: ClassVar[bool] = False
    not_inside_islands: ClassVar[str] = "has no step in common with the other ranks"
    not_on_mesh: ClassVar[str] = "has no common step on which all ranks of a mesh could agree"
    num_vectors: ClassVar[int]

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Whose kernels are compiled before the workers start."""
        return ()

    @property
    def optimizers(self) -> tuple[str, ...]:
        """See Method."""
        return GENERAL

    @property
    def optimizers_reason(self) -> str:
        """See Method."""
        return "brings no optimizer of its own"

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """Everything is whole on every rank; what is sent is a mean, since the clock decides when."""
        raise NotImplementedError

    def whole_plan(self, model: nn.Module, sent: Mapping[tuple[str, str], int]) -> MethodPlan:
        """A MethodPlan of these bytes a step, with everything whole."""
        whole = 4 * sum(shape.numel() for shape in trained_shapes(model).values())
        return MethodPlan(whole, whole, 2 * whole, sent, other={"vectors of the method": self.num_vectors * whole})
