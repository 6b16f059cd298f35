"""What a method says of itself: options, codecs, and the plan of what it holds and sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.collectives.feedback import Feedback
from thinwire.collectives.gather import gather_bytes
from thinwire.layout.formats import Strategy
from thinwire.state.agreement import word_bytes
from thinwire.state.memory import State

# The reason of strategies that shard the optimizer.
CUTS_TENSORS = "cuts tensors anywhere, so that the update of one element must not depend on others"


@runtime_checkable
class Method(Protocol):
    """A way to train one model on many ranks: what `--strategy` names."""

    @property
    def name(self) -> str:
        """What `--strategy` calls it."""
        ...

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs whose kernels are compiled before the workers start."""
        ...

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Names in `thinwire.optim.OPTIMIZERS` that it can drive; the first is its own choice."""
        ...

    @property
    def optimizers_reason(self) -> str:
        """Why it can't drive others, to follow "a strategy that ..."."""
        ...

    @property
    def shards_optimizer(self) -> bool:
        """Whether a rank holds the optimizer's state, and the masters, of a part of the weights alone."""
        ...

    @property
    def settled_after(self) -> int:
        """Steps at the start of a run that are another method's, and say nothing of this one's speed."""
        ...

    @property
    def not_inside_islands(self) -> str:
        """Why it can't train an island of a method such as DiLoCo, to follow "NAME inside an island"; empty: it can."""
        ...

    @property
    def not_on_mesh(self) -> str:
        """Why it can't train a model that another axis of a mesh cuts, to follow its name; empty: it can."""
        ...

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """What a rank would hold and send, known before anything runs.

        model: its shapes alone are used, so it may lie on the device "meta". micro_batches: backward passes of one
        step.
        Raises ConfigError where the method can't run on this grid.
        """
        ...


@dataclass(frozen=True)
class MethodPlan:
    """What one rank holds and sends, known before anything runs; bytes.

    weights, gradients: fp32, at their largest: whole where a forward, or the end of a backward, needs them whole.
    optimizer: with AdamW, whose two moments are fp32: masters, where they are not the weights, and moments. other: what
    else stays, by name, such as an error that is fed back. sent: in one step, by the meter's (operation, level).
    passing: weights and gradients that are whole for one part of the model at a time, besides those above. crossing:
    what all ranks of a node together send to other nodes, where that is less than the meter's level says: one rank's
    part of a ring.
    """

    weights: int
    gradients: int
    optimizer: int
    sent: Mapping[tuple[str, str], int]
    passing: int = 0
    crossing: int | None = None
    other: Mapping[str, int] = field(default_factory=dict)

    @property
    def memory(self) -> dict[str, int]:
        """All that is held, by name."""
        held = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        return held | {"passing": self.passing} | dict(self.other)

    def sent_on(self, level: str) -> int:
        """Bytes on one level."""
        return sum(num_bytes for (_, at), num_bytes in self.sent.items() if at == level)


class GradientMemory(Protocol):
    """What a method remembers of the reductions of one module, whose parameters some reductions leave out."""

    @property
    def state(self) -> State:
        """All that is remembered."""
        ...

    @property
    def piece_bytes(self) -> int:
        """Bytes that are kept of one piece: of what a lossy hop sends to one rank or node."""
        ...

    def of(self, present: Sequence[int]) -> Feedback:
        """The error feedback of the next reduction, in which the parameters `present` take part."""
        ...


class GatheredMethod(Strategy, Protocol):
    """A choice of codecs, and what FSDP2 asks of a method besides.

    secondary: gathers of unchanged weights stay inside a node.
    """

    @property
    def secondary(self) -> bool: ...

    def gradient_memory(self, numels: Sequence[int]) -> GradientMemory | None:
        """What is remembered of one module's reductions, by elements of a rank's part of each parameter."""
        ...


def trained_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shapes of the parameters that are trained, by name."""
    return {name: param.shape for name, param in model.named_parameters() if param.requires_grad}


def agreement_sent(topology: Topology, num_parameters: int = 0) -> dict[tuple[str, str], int]:
    """What the ranks' words about a step take, by the meter's (operation, level)."""
    return {
        ("all_gather_exact", level): sent for level, sent in gather_bytes(topology, word_bytes(num_parameters)).items()
    }


@runtime_checkable
class PlannedByRun(Protocol):
    """A strategy whose options may be shares of a run."""

    def for_run(self, num_steps: int, num_warmup_steps: int) -> Method:
        """The strategy for a run of so many steps, during the first of which the learning rate rises.

        Raises ConfigError where its options do not fit them.
        """
        ...
