"""The interface of a method: options, codecs, and the plan of memory and bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.collectives.feedback import Feedback
from thinwire.collectives.gather import gather_bytes
from thinwire.cost import StepGraph, Work
from thinwire.layout.formats import Strategy
from thinwire.methods.schedule import END, PlannedExchanges, draw, plain
from thinwire.state.agreement import word_bytes
from thinwire.state.memory import State

# By parameter, its shape and the elements [first, last) of each rank, of the flat whole.
Cuts = dict[str, tuple[torch.Size, list[tuple[int, int]]]]
# The reason of strategies whose weights are not whole all the time.
WEIGHTS_COME_AND_GO = "brings and drops weights around every layer, which compiled code can't have"
# Why strategies that shard the optimizer can't drive some optimizers.
CUTS_TENSORS = "cuts tensors anywhere, so that the update of one element must not depend on others"


@runtime_checkable
class Method(Protocol):
    """A way to train one model on many ranks, chosen by `--strategy`."""

    @property
    def name(self) -> str:
        """Name of the strategy in `--strategy`."""
        ...

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs whose kernels are compiled before the workers start."""
        ...

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Names in `thinwire.optim.OPTIMIZERS` that it can drive. The first is its default."""
        ...

    @property
    def optimizers_reason(self) -> str:
        """Why it can't drive others; completes the sentence "a strategy that ..."."""
        ...

    @property
    def shards_optimizer(self) -> bool:
        """Whether a rank holds the optimizer's state and the masters of only a part of the weights."""
        ...

    @property
    def settled_after(self) -> int:
        """Number of steps at the start of a run that use another method and don't show this one's speed."""
        return 0

    @property
    def exchanges_every(self) -> int:
        """Steps between two exchanges, over which the bytes of its plan are a mean."""
        return 1

    @property
    def keeps_whole_weights(self) -> bool:
        """Whether a rank that holds a shard keeps the whole weights from forward to backward."""
        return False

    @property
    def cpu_only(self) -> bool:
        """Whether it can't train on a GPU."""
        return False

    @property
    def has_mean_gradient(self) -> bool:
        """Whether the host has the mean gradient before the update, and clips it.

        If not, the method clips, or nothing does.
        """
        return True

    @property
    def num_passes(self) -> int:
        """Forward and backward passes of each micro-batch in a step."""
        return 1

    @property
    def no_local_gradient(self) -> str:
        """Why a rank never has a whole gradient of its own, to follow its name; empty: it has one after a backward."""
        return ""

    @property
    def not_inside_islands(self) -> str:
        """Why it can't train an island of a method such as DiLoCo, to follow "NAME inside an island"; empty: it can."""
        return ""

    @property
    def not_on_mesh(self) -> str:
        """Why it can't train a model that another axis of a mesh cuts, to follow its name; empty: it can."""
        return ""

    @property
    def not_measured(self) -> str:
        """Why the first steps can't be measured and then taken again, to follow its name; empty: they can."""
        return ""

    @property
    def worth_trying(self) -> Sequence[Mapping[str, Any]]:
        """Settings besides its own that a search for the fastest way tries, each the options that differ, by name."""
        return ()

    def not_compiled(self, topology: Topology) -> str:
        """Why torch.compile can't compile the model's layers, to follow its name; empty: it can."""
        return ""

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError if the options do not fit the model, of which only shapes are used."""
        return None

    def warm(self) -> None:
        """Compile the kernels of its steps that none of its codecs holds, or load them from a cache on disk."""
        return None

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """Memory and bytes of one rank, computed before anything runs.

        Args:
            model: only its shapes are used, so it may be on the device "meta".
            topology: the grid of ranks.
            micro_batches: backward passes of one step.

        Raises ConfigError if the method can't run on this grid.
        """
        ...

    def cuts(self, model: nn.Module, topology: Topology, names: Collection[str]) -> Cuts:
        """The elements of these parameters that the optimizer steps on each rank.

        By default every rank steps all of them by itself, for which a single span stands.
        """
        shapes = {name: shape for name, shape in trained_shapes(model).items() if name in names}
        return {name: (shape, [(0, shape.numel())]) for name, shape in shapes.items()}

    def exchanges(self, model: nn.Module, topology: Topology, micro_batches: int) -> PlannedExchanges:
        """The messages of the plan, and when they are sent; by default all after the last backward."""
        found = self.plan(model, topology, micro_batches)
        return PlannedExchanges((1.0,), tuple(plain(found.sent, END)))

    def schedule(self, model: nn.Module, topology: Topology, micro_batches: int, computes: Work) -> StepGraph:
        """A step of all ranks, with the bytes of `plan`, for `thinwire.cost.simulate`.

        Args:
            model, topology, micro_batches: see `plan`.
            computes: one forward of one micro-batch.

        Raises ConfigError if the method can't run on this grid.
        """
        # What is sent leaves with the last pass.
        return draw(self.exchanges(model, topology, micro_batches), topology, self.num_passes * micro_batches, computes)


@dataclass(frozen=True)
class MethodPlan:
    """Memory and traffic of one rank, in bytes, computed before anything runs.

    Args:
        weights, gradients: fp32, at their largest: whole if a forward, or the end of a backward, needs them whole.
        optimizer: with AdamW, which has two fp32 moments, or the only optimizer that the method takes: what it keeps,
            and the masters if they are not the weights.
        other: further state by name, such as an error that is fed back.
        sent: bytes sent in one step, by the meter's (operation, level).
        passing: weights and gradients that are whole for one part of the model at a time, besides those above.
        crossing: bytes that all ranks of a node together send to other nodes, if that is less than `sent` says: in a
            ring, one rank's part.
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
        """All memory, by name."""
        held = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        return held | {"passing": self.passing} | dict(self.other)

    def sent_on(self, level: str) -> int:
        """Bytes sent on one level."""
        return sum(num_bytes for (_, at), num_bytes in self.sent.items() if at == level)


class GradientMemory(Protocol):
    """State of the reductions of one module. A reduction may leave out some of its parameters."""

    @property
    def state(self) -> State:
        """All that is remembered."""
        ...

    @property
    def piece_bytes(self) -> int:
        """Bytes that are kept of one piece: of what a lossy hop sends to one rank or node."""
        ...

    def of(self, present: Sequence[int]) -> Feedback:
        """Error feedback of the next reduction, which covers the parameters `present`."""
        ...


class GatheredMethod(Strategy, Protocol):
    """A choice of codecs, with the further properties that FSDP2 needs of a method.

    secondary: gathers of unchanged weights stay inside a node.
    """

    @property
    def secondary(self) -> bool: ...

    def gradient_memory(self, numels: Sequence[int]) -> GradientMemory | None:
        """State of one module's reductions, or None. numels: elements of a rank's part of each parameter."""
        ...


def trained_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the trained parameters, by name."""
    return {name: param.shape for name, param in model.named_parameters() if param.requires_grad}


def agreement_sent(topology: Topology, num_parameters: int = 0) -> dict[tuple[str, str], int]:
    """Bytes of the ranks' agreement on a step, by the meter's (operation, level)."""
    return {
        ("all_gather_exact", level): sent for level, sent in gather_bytes(topology, word_bytes(num_parameters)).items()
    }


@runtime_checkable
class PlannedByRun(Protocol):
    """A strategy with options that may be shares of a run."""

    def for_run(self, num_steps: int, num_warmup_steps: int) -> Method:
        """The strategy for a run of num_steps steps whose learning rate rises during the first num_warmup_steps.

        Raises ConfigError if its options do not fit them.
        """
        ...
