"""What the methods on DistributedDataParallel share; each of them has a file in `data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.methods.interface import MethodPlan, agreement_sent, trained_shapes
from thinwire.methods.reduction import OPERATION, Reduction
from thinwire.optim import GENERAL
from thinwire.state.memory import Place


class DDPMethod:
    """What makes a way to average gradients a Method: it is applied by `wrap_ddp`."""

    # Why thinwire.zero can't host it, to follow its name.
    own_way: ClassVar[str] = "compress_ddp"
    not_on_zero: ClassVar[str] = "averages whole gradients, and zero gives every rank a slice"
    shards_optimizer: ClassVar[bool] = False
    not_inside_islands: ClassVar[str] = ""
    not_on_mesh: ClassVar[str] = ""
    # Whether it weighs what it remembers by the learning rate.
    uses_learning_rates = False

    @property
    def name(self) -> str:
        """What `--strategy` calls it."""
        raise NotImplementedError

    @property
    def find_unused_parameters(self) -> bool:
        """DDP's option of that name."""
        raise NotImplementedError

    @property
    def single_bucket(self) -> bool:
        """Whether the method wants all gradients at once; else buckets are reduced while backward goes on."""
        return False

    @property
    def whole_step(self) -> bool:
        """Whether gradients are reduced together when the last of a step has come, and clipped by the method.

        Then what has been sent can't be scaled any more; in a world of one too, for the method replaces a part of the
        optimizer.
        """
        return False

    @property
    def optimizers(self) -> tuple[str, ...]:
        """See Method."""
        return GENERAL

    @property
    def optimizers_reason(self) -> str:
        """See Method."""
        return "brings no optimizer of its own"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """None: nothing of thinwire's is compiled."""
        return ()

    @property
    def settled_after(self) -> int:
        """Steps at the start that are reduced in another way."""
        return 0

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Raise ConfigError for a model or an optimizer with which the method would go wrong."""

    def reduction(self, place: Place, seed: int) -> Reduction:
        """How one bucket is averaged, with its state."""
        raise NotImplementedError

    def bind(
        self,
        reduction: Reduction,
        trained: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Show a reduction that asks for it what it works with; before the first step, on every rank."""

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """Everything is whole on every rank; only the last micro-batch's backward communicates."""
        shapes = trained_shapes(model)
        whole = 4 * sum(shape.numel() for shape in shapes.values())
        reduction = self.reduction(Place(shapes, topology), 0)
        sent = {(OPERATION, level): num for level, num in reduction.sent_bytes().items()}
        words = agreement_sent(topology)
        # A node sends one rank's part of a ring to other nodes.
        ring = None
        if not reduction.is_metered:
            ring = sum(sent.values()) + topology.local_size * words["all_gather_exact", "inter"]
        return MethodPlan(
            weights=whole,
            gradients=whole,
            optimizer=2 * whole,
            sent=sent | words,
            crossing=ring if topology.num_nodes > 1 else 0,
            other=reduction.state.kept_bytes(),
        )


def check_plain_sgd(name: str, gives: str, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ConfigError where the optimizer would change what a method with a momentum of its own gives."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.SGD) or any(group["momentum"] for group in optimizer.param_groups):
        raise ConfigError(
            f"{name} keeps the momentum itself and gives {gives}, which {type(optimizer).__name__} would average or "
            "scale again: take torch.optim.SGD with momentum=0"
        )
