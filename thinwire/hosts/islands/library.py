"""DiLoCo, Streaming DiLoCo and local SGD around a loop of one's own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.collectives import Communicator, Meter, Peers, WorldPeers
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.collectives.meters import Meters
from thinwire.errors import ConfigError
from thinwire.hosts.islands.flights import Host
from thinwire.hosts.islands.loop import OuterLoop
from thinwire.methods.islands.base import IslandsMethod
from thinwire.methods.islands.diloco import DiLoCoMethod, LocalSGDMethod, StreamingDiLoCoMethod
from thinwire.state.replicas import fitting_parameters
from thinwire.table import Row
from thinwire.table import announce as announce_table


class WholeWeights:
    """A model that lies whole on every rank of its island, with a torch optimizer: a Host."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator | None) -> None:
        self.comm = comm
        for name, param in model.named_parameters():
            if isinstance(param, DTensor):
                raise ConfigError(f"{name!r} is a DTensor: for a sharded model there is --strategy diloco --inner fsdp")
        self._trained = fitting_parameters(model, optimizer)

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the parameters."""
        return {name: self._trained[name].detach().clone() for name in names}

    @torch.no_grad()
    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        """Write the parameters."""
        for name, value in values.items():
            self._trained[name].copy_(value)

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        """Nothing is sent."""
        return 0, 0


class Islands:
    """Outer steps with other islands after the inner steps of `optimizer`; a context manager.

    optimizer: a torch optimizer on a model that every rank of the island holds whole, or one made by `thinwire.zero`.
    peers: the other islands, on the island's first rank; by default every rank of the default process group is an
    island. within: the ranks of this island where it has several; its model must average gradients over them, say by
    DistributedDataParallel. announce: print the table of what is in effect, on the first island.

    At the end of the `with` block all that is under way is received, and the model has the outer parameters, the same
    on all islands: the result. Where islands differ then, it is the mean of their weights. Every island must take the
    same number of steps. Raises ConfigError for options or models that don't fit.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: IslandsMethod,
        *,
        peers: Peers | None = None,
        within: dist.ProcessGroup | None = None,
        seed: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checked: bool = False,
        announce: bool = True,
    ) -> None:
        self.strategy = strategy
        sharded = hasattr(optimizer, "masters")
        comm = Communicator(within, timeout_s=timeout_s, checked=checked) if within is not None else None
        host = cast(Host, optimizer) if sharded else WholeWeights(model, optimizer, comm)
        torch_optimizer = cast(Any, optimizer).inner if sharded else optimizer
        if peers is None and (comm is None and not sharded):
            peers = WorldPeers(timeout_s=timeout_s, checked=checked)
        self.loop = OuterLoop(host, model, strategy.method(), peers, torch_optimizer=torch_optimizer, seed=seed)
        self._own_comm = comm
        own_meter = host.comm.meter if host.comm is not None else Meter()
        self.meter = Meters(own_meter, self.loop.peers)
        self._hook = optimizer.register_step_post_hook(lambda *_: self.loop.after_step())
        if announce and self.loop.peers is not None and self.loop.peers.island == self.loop.peers.members[0]:
            announce_table(self.describe())

    def __enter__(self) -> Islands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.loop.abandon()
            return
        self.finish()
        self.close()

    def finish(self) -> None:
        """Receive what is under way, and leave the outer parameters in the model; further steps exchange nothing."""
        self._hook.remove()
        self.loop.finish()

    def outer_parameters(self) -> AbstractContextManager[None]:
        """The model has the outer parameters inside, for evaluation, and its own again after it."""
        return self.loop.outer_parameters()

    @property
    def steps(self) -> int:
        """Steps that the islands have taken; it jumps where this one was away and has caught up."""
        return self.loop.steps

    @property
    def weight(self) -> float:
        """Of this island in the means of the exchanges that follow; set it on the island's first rank."""
        return self.loop.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self.loop.weight = weight

    @property
    def bytes_per_round(self) -> int:
        """Payload this rank sends in sync_every steps: each fragment once."""
        return self.loop.bytes_per_round

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        return [(f"method {self.strategy.name}", "around the optimizer's steps", ""), *self.loop.rows()]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the outer state; to be saved beside model and optimizer, between steps."""
        return self.loop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what state_dict gave, after model and optimizer; raises ConfigError where it does not fit."""
        self.loop.load_state_dict(state)

    def close(self) -> None:
        """Wait for what is under way, and leave the other islands."""
        self._hook.remove()
        self.loop.close()
        if self._own_comm is not None:
            self._own_comm.close()


class DiLoCo(Islands):
    """DiLoCo around a loop of one's own; options: those of DiLoCoMethod, then those of Islands."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int = 100, **options: Any
    ) -> None:
        super().__init__(model, optimizer, *_split(DiLoCoMethod, sync_every, options), **options)


class StreamingDiLoCo(Islands):
    """Streaming DiLoCo around a loop of one's own; options: those of StreamingDiLoCoMethod, then those of Islands."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int = 100, **options: Any
    ) -> None:
        super().__init__(model, optimizer, *_split(StreamingDiLoCoMethod, sync_every, options), **options)


class LocalSGD(Islands):
    """Local SGD around a loop of one's own; options: those of LocalSGDMethod, then those of Islands."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int = 16, **options: Any
    ) -> None:
        super().__init__(model, optimizer, *_split(LocalSGDMethod, sync_every, options), **options)


def _split(kind: type, sync_every: int, options: dict[str, Any]) -> tuple[IslandsMethod]:
    """The strategy from the options that are its own, which are taken out."""
    own = {name: options.pop(name) for name in list(options) if name in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    return (kind(sync_every=sync_every, **own),)
