"""Base of the methods on DistributedDataParallel; each method has a file in `data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.methods.interface import Method, MethodPlan, agreement_sent, trained_shapes
from thinwire.methods.reduction import OPERATION, Reduction
from thinwire.methods.schedule import ALL, BACKWARD, END, RING, Hop, PlannedExchange, PlannedExchanges, plain, shares_of
from thinwire.optim import GENERAL
from thinwire.state.memory import Place

# DDP's own sizes: of the bucket that leaves first, and of the others.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
# Tensors that an optimizer keeps for a parameter, where these are not AdamW's two moments.
STATES = {"sgd-plain": 0, "dgc-sgd": 1}


class DDPMethod(Method):
    """Base class of methods that average gradients in DDP; applied by `wrap_ddp`."""

    # Why thinwire.zero can't host it; follows the method's name in messages.
    own_way: ClassVar[str] = "compress_ddp"
    not_on_zero: ClassVar[str] = "averages whole gradients, and zero gives every rank a slice"
    shards_optimizer: ClassVar[bool] = False
    # Whether it weights its state by the learning rate.
    uses_learning_rates = False

    @property
    def name(self) -> str:
        """Name of the strategy in `--strategy`."""
        raise NotImplementedError

    @property
    def find_unused_parameters(self) -> bool:
        """DDP's option of the same name."""
        raise NotImplementedError

    @property
    def single_bucket(self) -> bool:
        """Whether the method needs all gradients at once. Otherwise buckets are reduced during backward."""
        return False

    @property
    def whole_step(self) -> bool:
        """Whether gradients are reduced together after the last one of a step, and clipped by the method.

        Sent gradients can't be scaled later. This also holds in a world of one, because the method replaces a part of
        the optimizer.
        """
        return False

    @property
    def has_mean_gradient(self) -> bool:
        """See Method."""
        return not self.whole_step

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
        """No codecs: nothing of thinwire's is compiled."""
        return ()

    @property
    def settled_after(self) -> int:
        """Number of steps at the start that are reduced in another way."""
        return 0

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Raise ConfigError for a model or an optimizer that the method can't use."""

    def sample(self) -> Sequence[Tensor]:
        """What every rank computes by itself of what all have received, here of fixed numbers, for a comparison.

        Empty if all compute it element by element, so that the bits are equal on all machines.
        """
        return ()

    def reduction(self, place: Place, seed: int) -> Reduction:
        """The reduction of buckets, with its state."""
        raise NotImplementedError

    def bind(
        self,
        reduction: Reduction,
        trained: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Give a reduction the parameters and the optimizer it asks for. Called on all ranks before the first step."""

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """Weights, gradients and state are whole on every rank. Only the last micro-batch's backward communicates."""
        shapes = trained_shapes(model)
        whole = 4 * sum(shape.numel() for shape in shapes.values())
        reduction = self.reduction(Place(shapes, topology), 0)
        sent = {(OPERATION, level): num for level, num in reduction.sent_bytes().items()}
        words = agreement_sent(topology)
        # In a ring, a node sends only one rank's part to other nodes.
        ring = None
        if not reduction.is_metered:
            ring = sum(sent.values()) + topology.local_size * words["all_gather_exact", "inter"]
        return MethodPlan(
            weights=whole,
            gradients=whole,
            optimizer=STATES.get(self.optimizers[0], 2) * whole,
            sent=sent | words,
            crossing=ring if topology.num_nodes > 1 else 0,
            other=reduction.state.kept_bytes(),
        )

    def exchanges(self, model: nn.Module, topology: Topology, micro_batches: int) -> PlannedExchanges:
        """DDP's buckets are sent as backward fills them, or all at its end if the method needs them together."""
        shapes = trained_shapes(model)
        reduction = self.reduction(Place(shapes, topology), 0)
        units = [list(shapes)] if self.single_bucket or self.whole_step else buckets_of(shapes)
        numels = [sum(shapes[name].numel() for name in names) for names in units]
        total, to = sum(numels), ALL if reduction.is_metered else RING
        sent = {level: num for level, num in reduction.sent_bytes().items() if num}
        found = [
            PlannedExchange(
                OPERATION, BACKWARD, tuple(Hop(level, num * numel / total, to) for level, num in sent.items()), unit
            )
            for unit, numel in enumerate(numels)
            if sent
        ]
        words = plain(agreement_sent(topology), END)
        return PlannedExchanges(shares_of(model, units), (*found, *words), kept_bytes=28.0 * total)


def buckets_of(shapes: Mapping[str, torch.Size]) -> list[list[str]]:
    """The parameters of DDP's buckets in order of forward: the last ones are a small bucket, sent first."""
    buckets: list[list[str]] = []
    held, most = 0, FIRST_BUCKET_BYTES
    for name in list(shapes)[::-1]:
        if not buckets or held >= most:
            most = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            buckets.append([])
            held = 0
        buckets[-1].insert(0, name)
        held += 4 * shapes[name].numel()
    return buckets[::-1]


def check_plain_sgd(name: str, gives: str, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ConfigError if the optimizer would change the update of a method with a momentum of its own.

    Also if it is not known, since what such a method gives is no gradient.
    """
    if optimizer is None:
        raise ConfigError(
            f"{name} was given no optimizer, keeps the momentum itself and gives {gives}, which most optimizers would "
            "average or scale again: give it yours, torch.optim.SGD with momentum=0"
        )
    if not isinstance(optimizer, torch.optim.SGD) or any(group["momentum"] for group in optimizer.param_groups):
        raise ConfigError(
            f"{name} keeps the momentum itself and gives {gives}, which {type(optimizer).__name__} would average or "
            "scale again: take torch.optim.SGD with momentum=0"
        )
