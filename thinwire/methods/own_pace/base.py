"""The base of methods without a common step: every rank is an island and steps when it can."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.methods.front import Front
from thinwire.methods.interface import Method, MethodPlan, trained_shapes
from thinwire.optim import GENERAL
from thinwire.table import Row


class OwnPaceMethod(Front, Method):
    """Options of such a method: a Method, and the context around your own loop.

    num_vectors: fp32 vectors of the model's length that are kept on the CPU. rows: further rows of the start-up table
    that a user of the method must know.
    """

    name: ClassVar[str]
    shards_optimizer: ClassVar[bool] = False
    not_inside_islands: ClassVar[str] = "has no step in common with the other ranks"
    not_on_mesh: ClassVar[str] = "has no common step on which all ranks of a mesh could agree"
    num_vectors: ClassVar[int]
    rows: ClassVar[tuple[Row, ...]] = ()

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs whose kernels are compiled before the workers start."""
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
        """Everything is whole on every rank. The bytes are a mean, because the clock decides when messages are sent."""
        raise NotImplementedError

    def whole_plan(self, model: nn.Module, sent: Mapping[tuple[str, str], int]) -> MethodPlan:
        """A MethodPlan with these bytes per step and everything whole."""
        whole = 4 * sum(shape.numel() for shape in trained_shapes(model).values())
        return MethodPlan(whole, whole, 2 * whole, sent, other={"vectors of the method": self.num_vectors * whole})
