"""A host's view of the mesh: the replicas of one axis, and all ranks that train the same model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives import Communicator, Meter, Topology
from thinwire.errors import ConfigError
from thinwire.hosts.stages import StageAxis
from thinwire.hosts.tensor import TensorAxis
from thinwire.state.agreement import Agreed, StepStatus, word_bytes
from thinwire.state.replicas import SPREAD
from thinwire.table import Row


class Parts(Protocol):
    """Ranks of which each has a part of some parameters, under their own names, such as of experts.

    shapes: of these parameters, whole.
    """

    shapes: Mapping[str, torch.Size]

    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors from every rank's part. A collective over these ranks."""
        ...

    def part(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of whole tensors."""
        ...

    def gather_bytes(self, names: Collection[str]) -> int:
        """Bytes that a rank sends to gather these parameters."""
        ...


class Sharing(Protocol):
    """Ranks that share a model's experts or sequences. everyone: over all ranks that train the model."""

    everyone: Communicator

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        ...


# By model. An optimizer that is made later counts their messages with its own, and tells of them.
SHARED: WeakKeyDictionary[nn.Module, list[Sharing]] = WeakKeyDictionary()


def sharing_of(model: nn.Module) -> list[Sharing]:
    """The ranks that share parts of a model, or of a model inside of it, in the order in which they were made."""
    return [sharing for module in model.modules() for sharing in SHARED.get(module, ())]


def meter_of(model: nn.Module) -> Meter | None:
    """The meter of what ranks share of a model; None: they share nothing."""
    return next((sharing.everyone.meter for sharing in sharing_of(model)), None)


class Spread(Parts, Protocol):
    """Ranks over which the experts of a model are spread, without a mesh; see `expert_parallel`.

    comm: over the ranks that share the experts. replicas: global ranks with the same experts as this one.
    """

    comm: Communicator
    replicas: list[int]

    def whole(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """A context in which all experts, or those of a part of the model, are whole on this rank."""
        ...

    def follow(self, optimizer: Any) -> None:
        """Let options that depend on a step have their effect."""
        ...


GroupFor = Callable[[str, Tensor], Any]


def spread_over(model: nn.Module) -> Spread | None:
    """The ranks over which a model's experts are spread; None: they are whole on this one."""
    found = (vars(module).get(SPREAD) for module in model.modules())
    return next((ranks for ranks in found if ranks is not None), None)


def with_spread(model: nn.Module, spread: Spread, group_for: GroupFor | None) -> GroupFor:
    """`group_for`, by default with the replicas of the experts. Raises ConfigError if it leaves out some of them."""
    experts = {at: module for at, module in model.named_modules() if SPREAD in vars(module)}
    tensors = {
        name: tensor
        for at, module in experts.items()
        for name, tensor in (*module.named_parameters(at), *module.named_buffers(at))
    }
    if group_for is None:
        return lambda name, tensor: spread.replicas if name in tensors else None
    for name, tensor in tensors.items():
        if group_for(name, tensor) is None:
            raise ConfigError(
                f"group_for: gives no group for {name!r}, of which ranks have other experts each; nearest: leave "
                "group_for out"
            )
    return group_for


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh, for the method that is applied to it.

    Args:
        group: the ranks along the axis that share this rank's place on all other axes.
        whole: the mesh, flat: all ranks that take every step together; equal to `group` if there is no other axis.
        tensor: the axis that cuts parameters, if any.
        num_names: parameters of the whole model, if ranks of another axis hold other parameters; else 0.
        group_for: (name, parameter or buffer) -> the global ranks that hold replicas of it; None: all of `group`.
        meter: what counts the messages; None: a new one.
        stages: the axis that cuts the layers, if a method of islands asks for whole models.
        parts: the ranks that share some parameters between them, such as those of experts.
    """

    group: DeviceMesh
    whole: DeviceMesh
    tensor: TensorAxis | None = None
    num_names: int = 0
    group_for: Callable[[str, Tensor], Sequence[int] | None] | None = None
    meter: Meter | None = None
    stages: StageAxis | None = None
    parts: Parts | None = None

    def counts(self, name: str) -> bool:
        """Whether this rank counts its part of a parameter in sums. One of the ranks with the same elements does."""
        return self.tensor is None or self.tensor.counts(name)


@dataclass(frozen=True)
class Ranks:
    """Communicators of a host.

    comm: over the method's axis. everyone: over all ranks of the mesh, which agree on every step. counts, num_names:
    see Axis.
    """

    comm: Communicator
    everyone: Communicator
    counts: Callable[[str], bool] = lambda name: True
    num_names: int = 0

    def agree(self, word: StepStatus) -> Agreed:
        """Exchange this rank's StepStatus with all ranks of the mesh. Return the result. A collective."""
        room = self.num_names if word.used else 0
        words = self.everyone.wait(self.everyone.all_gather_exact(word.pack(room)))
        own = [self.everyone.global_ranks.index(rank) for rank in self.comm.global_ranks]
        return Agreed.of(words, len(word.used), own if self.num_names else None)

    def word_bytes(self, num_parameters: int = 0) -> int:
        """Payload bytes of this rank's status to all others."""
        room = max(num_parameters, self.num_names) if num_parameters else 0
        return word_bytes(room) * (self.everyone.world_size - 1)

    def close(self) -> None:
        """Wait for all communication and give the process groups back."""
        for comm in dict.fromkeys([self.comm, self.everyone]):
            comm.close()


def open_ranks(
    axis: Axis | None,
    *,
    local_size: int | None,
    timeout_s: float,
    checked: bool,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    meter: Meter | None = None,
) -> Ranks:
    """Communicators for an axis of a mesh or, without a mesh, for `group`, by default all ranks. A collective.

    local_size: ranks per node, counting all ranks of the mesh. meter: without a mesh, what counts the messages; None: a
    new one. Both communicators use one meter.
    """
    if axis is None:
        comm = Communicator(group, local_size=local_size, timeout_s=timeout_s, checked=checked, meter=meter)
        return Ranks(comm, comm)
    everyone = Communicator(axis.whole, local_size=local_size, timeout_s=timeout_s, checked=checked, meter=axis.meter)
    if axis.whole is axis.group:
        return Ranks(everyone, everyone, axis.counts, axis.num_names)
    members = [everyone.global_ranks.index(rank) for rank in axis.group.mesh.flatten().tolist()]
    own = along(everyone.topology, members)
    comm = Communicator(axis.group, local_size=own, timeout_s=timeout_s, checked=checked, meter=everyone.meter)
    comm.topology_reason = f"of this axis; the whole mesh: {everyone.topology}, {everyone.topology_reason}"
    return Ranks(comm, everyone, axis.counts, axis.num_names)


def neighbours(rank: int, ranks: int, stride: int = 1) -> list[int]:
    """The group of `ranks` ranks to which `rank` belongs; each is `stride` ranks after the one before."""
    first = rank - rank // stride % ranks * stride
    return list(range(first, first + ranks * stride, stride))


def communicator_along(mesh: DeviceMesh, everyone: Communicator, **options: Any) -> Communicator:
    """A communicator over one axis of a mesh. everyone: over all ranks of the mesh."""
    members = [everyone.global_ranks.index(rank) for rank in mesh.mesh.flatten().tolist()]
    return Communicator(mesh, local_size=along(everyone.topology, members), **options)


def along(grid: Topology, members: list[int]) -> int:
    """Ranks per node among some ranks of a grid; 1 if they are spread unevenly over the nodes."""
    return grid.subgroup(members).local_size
