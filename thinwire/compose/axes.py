"""What each axis of a mesh does to a model before the data axis gets it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire import _compat
from thinwire.collectives import Communicator, Peers, WorldPeers
from thinwire.compose.checks import checked_method, spreads_experts, with_ranks
from thinwire.compose.meshes import names_of, sizes_of
from thinwire.errors import ConfigError
from thinwire.hosts.pipeline.part import StagePart, take_part
from thinwire.hosts.ranks import Axis
from thinwire.hosts.stages import StageAxis, skeleton_of
from thinwire.hosts.tensor import TensorAxis, check_same_copies, cut_parameters
from thinwire.methods.experts import ExpertParallel
from thinwire.methods.interface import Method
from thinwire.methods.memory import Residency, check_outer, resident_method
from thinwire.methods.outer.base import Connected, IslandsMethod
from thinwire.methods.pipeline.options import Pipeline
from thinwire.methods.sequence import SequenceParallel
from thinwire.models.hf import HFCausalLM
from thinwire.models.moe import MoELlama
from thinwire.models.vocabulary import lose_by_rows
from thinwire.table import Row


@dataclass(frozen=True)
class AxisMethods:
    """What `parallelize` was given: the method of the data axis, in that of islands, and the options of other axes.

    alike: what all ranks must have been given; the peers of an island, and a residency, are a rank's own.
    """

    method: Method | Connected
    pipeline: Pipeline
    sequence: SequenceParallel
    experts: ExpertParallel | None
    residency: Residency | None
    alike: list[Any]

    @classmethod
    def of(cls, methods: Iterable[Any], model: nn.Module, mesh: DeviceMesh, *, has_initial: bool) -> AxisMethods:
        """The methods by their axes, with the ranks of the mesh. Raises ConfigError with all that does not fit."""
        pipelines = [method for method in methods if isinstance(method, Pipeline)]
        sequences = [method for method in methods if isinstance(method, SequenceParallel)]
        experts = [method for method in methods if isinstance(method, ExpertParallel)]
        residencies = [method for method in methods if isinstance(method, Residency)]
        layouts = Pipeline | SequenceParallel | ExpertParallel | Residency
        others = [method for method in methods if not isinstance(method, layouts)]
        method = checked_method(
            model, mesh, others, pipelines, sequences, experts,
            is_filled=has_initial and bool(residencies or "pipeline" in names_of(mesh)),
        )  # fmt: skip
        if len(residencies) > 1:
            raise ConfigError("a process has one residency: give one thinwire.Residency")
        if residencies:
            resident_method(method, names_of(mesh), residencies[0])
            check_outer(residencies[0], method)
        sizes, alike = sizes_of(mesh), [one for one in methods if not isinstance(one, Connected | Residency)]
        return cls(
            method, (*pipelines, Pipeline())[0],
            replace((*sequences, SequenceParallel())[0], parallel=sizes.get("sequence", 1)),
            with_ranks((*experts, ExpertParallel())[0], mesh) if spreads_experts(mesh, experts) else None,
            (*residencies, None)[0], alike,
        )  # fmt: skip


def cut_layers(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, given: AxisMethods,
    initial: Callable[[str], Tensor] | None,
) -> tuple[StagePart, StageAxis | None]:  # fmt: skip
    """Leave this rank's layers in the model: its part of a pipeline, and beside islands how their stages lie."""
    # Before the others' stages leave the model.
    skeleton = skeleton_of(model) if isinstance(given.method, IslandsMethod | Connected) else None
    part = take_part(model, optimizer, given.pipeline, mesh["pipeline"], initial)
    if skeleton is None:
        return part, None
    trained = tuple(map(part.holdings.trained_by, range(mesh["pipeline"].size())))
    return part, StageAxis(mesh["pipeline"], skeleton, trained)


def cut_matrices(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, part: StagePart | None
) -> tuple[TensorAxis, StagePart | None]:
    """The tensor axis of a model, or of what a stage has of it, and that part with local tensors."""
    tensor = cut_parameters(model, optimizer, mesh["tensor"], () if part is None else part.chunks.values())
    if part is None:
        lose_by_rows(model)
    return tensor, None if part is None else part.local(tensor)


def axis_of(
    mesh: DeviceMesh, tensor: TensorAxis | None, part: StagePart | None, stages: StageAxis | None
) -> Axis | None:
    """The ranks of the data axis' method; None: all there are.

    Ranks of a sequence have the same weights: to that method they are like all others. So are those that hold different
    experts, for all other weights.
    """
    names = names_of(mesh)
    # Inside of an island.
    is_flat = {*names} - {"island"} <= {"data", "sequence", "expert"}
    if is_flat and "island" not in names and mesh.size() == dist.get_world_size() and "expert" not in names:
        return None
    inside = mesh[tuple(name for name in names if name != "island")]
    whole = _compat.flattened(inside) if inside.ndim > 1 else inside
    group = whole if is_flat or inside.ndim == 1 else mesh["data"]
    return Axis(group, whole, tensor, part.num_names if part is not None else 0, stages=stages)


def share_sums(model: nn.Module, comm: Communicator) -> list[Row]:
    """Let the balance loss of a mixture be that of all ranks' tokens. Returns a row where it can't be."""
    if isinstance(model, MoELlama | HFCausalLM) and comm.world_size > 1:
        model.gather = partial(gathered, comm)
        return model.balance_rows() if isinstance(model, HFCausalLM) else []
    return []


def gathered(comm: Communicator, sums: Tensor) -> Tensor:
    """The `sums` of all ranks, stacked in rank order."""
    return comm.wait(comm.all_gather_exact(sums.cpu())).to(sums.device)


def other_islands(mesh: DeviceMesh, timeout_s: float, checked: bool) -> Peers | None:
    """The islands of a mesh, on the first rank of each island; they stay the same from start to end."""
    axis = names_of(mesh).index("island")
    place = mesh.get_coordinate()
    assert place is not None
    if any(at for dim, at in enumerate(place) if dim != axis):
        return None
    return WorldPeers(mesh["island"], timeout_s=timeout_s, checked=checked)


def tensor_row(model: nn.Module, axis: TensorAxis, timeout_s: float) -> Row:
    """The start-up row about the tensor axis. A collective over it."""
    comm = Communicator(axis.mesh, local_size=1, timeout_s=timeout_s)
    differed = check_same_copies(model, axis, comm)
    comm.close()
    effect = f"{len(axis.local_names())} parameters cut over {axis.mesh.size()} ranks"
    if why := vars(model).get("whole_vocabulary"):
        effect += f"; embedding and head are whole on each: {why}"
    sent = f"{len(differed)} copies differed and were sent by its first rank" if differed else "copies are equal"
    return "tensor axis", effect, sent
