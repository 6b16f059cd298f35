"""Outer steps around your own training loop: what `DiLoCo(model, optimizer)` and its relatives return."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from thinwire.collectives import Communicator, Meter, Peers, WorldPeers
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.collectives.peers import Meters
from thinwire.errors import ConfigError
from thinwire.islands.island import Host, ShardedHost
from thinwire.islands.loop import OuterLoop
from thinwire.islands.traffic import LoopTraffic
from thinwire.methods.front import around
from thinwire.methods.outer.base import IslandsMethod
from thinwire.state.replicas import fitting_parameters, refuse_spread
from thinwire.state.whole import whole, write_whole
from thinwire.table import Row, announce as announce_table


class TorchWeights:
    """A Host of a model that a torch optimizer steps: whole on every rank of its island, or sharded by torch (DTensor).

    Sharded parameters, of tensor parallelism or FSDP2, are gathered over their mesh for each exchange, and written back
    shard by shard. comm: the island's ranks; None for one. Raises ConfigError for sharded parameters without it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator | None) -> None:
        self.comm = comm
        self._trained = fitting_parameters(model, optimizer)
        for name, param in self._trained.items():
            if isinstance(param, DTensor) and param.device_mesh.size() > (comm.world_size if comm else 1):
                raise ConfigError(
                    f"{name!r} is sharded over {param.device_mesh.size()} ranks, which must be in one island: give "
                    "their process group as within="
                )

    def masters(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the whole parameters. The bytes that torch sends for them are counted by formula."""
        if self.comm is not None and (sent := self.handover_bytes(names)[0]):
            self.comm.meter.count("masters", "intra", sent, sent)
        return {name: whole(self._trained[name]) for name in names}

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None:
        """Write the parameters in place."""
        for name, value in values.items():
            write_whole(self._trained[name], value)

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]:
        """A rank sends its shard to the other ranks of the mesh for `masters`; `adopt_weights` sends nothing."""
        sharded = [param for name in names if isinstance(param := self._trained[name], DTensor)]
        return sum((param.device_mesh.size() - 1) * param.to_local().nbytes for param in sharded), 0


class Islands:
    """Outer steps with other islands after the inner steps of `optimizer`; a context manager.

    At the end of the `with` block it waits for all exchanges, and the model gets the outer parameters, the same on all
    islands: the result. If islands differ at that point, it is the mean of their weights. Every island must take the
    same number of steps.

    Args:
        model: the same on all islands.
        optimizer: a torch optimizer on a model that every rank of the island holds whole, or that torch shards over the
            island (tensor parallelism, FSDP2), or one made by `thinwire.zero`.
        method: such as `DiLoCo()`.
        peers: the other islands, on the island's first rank; by default every rank of the default process group is an
            island.
        within: the ranks of this island if it has several: a process group or one dimension of a DeviceMesh. If they
            see different data, the model must average gradients over them, for example by DistributedDataParallel.
        seed: of stochastic rounding.
        timeout_s, checked: see Communicator.
        announce: the first island prints the table of what is in effect.

    Raises ConfigError for options or models that don't fit.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: IslandsMethod,
        *,
        peers: Peers | None = None,
        within: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checked: bool = False,
        announce: bool = True,
    ) -> None:
        if method.climb is not None:
            raise ConfigError(
                f"ascent {method.ascent:g} takes two backwards a step, and your own loop takes one: take "
                "thinwire.parallelize, whose stage.forward_backward takes both, or leave ascent out"
            )
        refuse_spread(model)
        self.method = method
        comm = Communicator(within, timeout_s=timeout_s, checked=checked) if within is not None else None
        host: Host = optimizer if isinstance(optimizer, ShardedHost) else TorchWeights(model, optimizer, comm)
        torch_optimizer = optimizer.inner if isinstance(optimizer, ShardedHost) else optimizer
        if peers is None and host.comm is None:
            peers = WorldPeers(timeout_s=timeout_s, checked=checked)
        self.loop = OuterLoop(host, model, method.outer(), peers, torch_optimizer=torch_optimizer, seed=seed)
        self.traffic = LoopTraffic(self.loop)
        self._own_comm = comm
        own_meter = host.comm.meter if host.comm is not None else Meter()
        self.meter = Meters(own_meter, self.loop.exchanges.connected)
        self._hook = optimizer.register_step_post_hook(lambda *_: self.loop.after_step())
        connected = self.loop.exchanges.connected
        if announce and connected is not None and connected.island == connected.members[0]:
            announce_table(self.describe())

    def __enter__(self) -> Islands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.loop.exchanges.abandon()
            return
        self.finish()
        self.close()

    def finish(self) -> None:
        """Wait for all exchanges, and leave the outer parameters in the model. Further steps exchange nothing."""
        self._hook.remove()
        self.loop.finish()

    def outer_parameters(self) -> AbstractContextManager[None]:
        """Context in which the model has the outer parameters, for evaluation; afterwards it has its own again."""
        return self.loop.outer_parameters()

    @property
    def steps(self) -> int:
        """Steps that the islands have taken. It jumps if this island was away and has caught up."""
        return self.loop.steps

    @property
    def weight(self) -> float:
        """Weight of this island in the means of later exchanges. Set it on the island's first rank."""
        return self.loop.exchanges.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self.loop.exchanges.weight = weight

    @property
    def bytes_per_round(self) -> int:
        """Payload bytes that this rank sends in sync_every steps: each fragment once."""
        return self.traffic.bytes_per_round

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        return [(f"method {self.method.name}", "around the optimizer's steps", ""), *self.traffic.rows()]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the outer state. Save it between steps, beside model and optimizer."""
        return self.loop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state_dict, after model and optimizer were loaded. Raises ConfigError if it does not fit."""
        self.loop.load_state_dict(state)

    def close(self) -> None:
        """Wait for all exchanges, and leave the other islands."""
        self._hook.remove()
        self.loop.exchanges.close()
        if self._own_comm is not None:
            self._own_comm.close()


@around.register
def _islands(method: IslandsMethod, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Islands:
    return Islands(model, optimizer, method, **options)
