"""`parallelize`: gives each method the host that runs it, each on its axis of one mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives import Meter
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.compose.axes import AxisMethods, axis_of, cut_layers, cut_matrices, other_islands, share_sums, tensor_row
from thinwire.compose.checks import check_joint
from thinwire.compose.meshes import check_mesh, holders_of, names_of, node_inside, shape_of, sizes_of, stride_of
from thinwire.compose.pipelined_model import PipelinedModel
from thinwire.compose.stage import Stage
from thinwire.errors import ConfigError
from thinwire.hosts.arguments import check_arguments
from thinwire.hosts.experts import expert_parallel
from thinwire.hosts.experts.checks import check_optimizer
from thinwire.hosts.interface import apply
from thinwire.hosts.pipeline.stage import PipelineStage
from thinwire.hosts.sequence import sequence_parallel
from thinwire.hosts.sharded.optimizer import ShardedOptimizer
from thinwire.methods.experts import ExpertParallel
from thinwire.methods.interface import Method
from thinwire.methods.memory import Residency, same_everywhere
from thinwire.methods.outer.base import Connected, IslandsMethod
from thinwire.methods.pipeline.options import Pipeline
from thinwire.methods.sequence import SequenceParallel
from thinwire.state.given import optimizer_options, same_on_all_ranks
from thinwire.table import Row, announce as announce_table


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    methods: Iterable[Method | Connected | Pipeline | SequenceParallel | ExpertParallel | Residency],
    *,
    local_size: int | None = None,
    overlap: bool = False,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    checked: bool = False,
    initial: Callable[[str], Tensor] | None = None,
    announce: bool = True,
) -> Stage:
    """Train `model` on a mesh, with at most one method on each axis. A collective over the mesh.

    - The data axis: replicas; its method averages gradients. Most methods also work beside a tensor axis.
    - The tensor axis is torch's. Call `parallelize_module(model, mesh["tensor"], plan)` first, then make the optimizer.
    - The island axis: a method such as DiLoCo exchanges whole parameters in some of the updates. The islands of the
      mesh stay the same from start to end.
    - The pipeline axis: each rank holds some of the layers; see PipelinedModel.
    - The sequence axis: each rank holds some of a sequence's tokens. The data axis's method then averages over the
      ranks of both axes.
    - The expert axis: each rank holds some of a mixture's experts, and has a batch of its own. For the data axis's
      method, all ranks are replicas of the other weights.

    The gradient norm is that of the whole model. Ranks that hold the same elements stay equal bit for bit.

    Args:
        model: on every rank of the mesh; its parameters are plain tensors, or DTensors on the tensor axis.
        optimizer: over the model's parameters. If a method shards it: an elementwise one, or thinwire.Muon.
        mesh: its dimensions are named by AXES, such as ("data", "tensor").
        methods: at most one for each axis, such as [thinwire.DiLoCo(), thinwire.SDP4Bit()]. Without a method for the
            data axis, the `inner` of an islands method works there. The options of the pipeline, sequence and expert
            axes belong here too: `thinwire.Pipeline()`, `thinwire.SequenceParallel()`, `thinwire.ExpertParallel()`;
            the mesh sets their `parallel`. A `thinwire.Residency()` says what part of a sharded method's state lies on
            a disk.
        local_size: ranks per node; None: found from the launcher or host names.
        overlap: weights may arrive during the next forward.
        seed: of all randomness.
        timeout_s: how long one message may take, in seconds.
        checked: put a header and a checksum in front of every message.
        initial: with a Residency or a pipeline axis, for a model made by `thinwire.hollow`; see `thinwire.zero`. Beside
            a pipeline it is asked for the parameters of this rank's stage alone, in order of registration.
        announce: rank 0 prints what was asked for, what is in effect, and why they differ.

    Raises ConfigError with all reasons at once, before anything is sent: for a mesh without names, an axis without a
    method, two methods for one axis, everything that a method refuses, and parameters that do not fit the tensor axis.
    Then ranks compare their arguments; raises ConfigError that names the first difference.
    """
    check_arguments("parallelize", model, optimizer, local_size=local_size, overlap=overlap, seed=seed,
        timeout_s=timeout_s, checked=checked, announce=announce,
    )  # fmt: skip
    if not isinstance(methods, Sequence) or isinstance(methods, str):
        raise ConfigError(f"methods must be a list, such as [{methods!r}]")
    check_mesh(mesh)
    with same_on_all_ranks(mesh.mesh.flatten().tolist(), timeout_s) as alike:
        given = AxisMethods.of(methods, model, mesh, has_initial=initial is not None)
        check_joint(optimizer, sizes_of(mesh))
        alike |= {"methods": given.alike, "local_size": local_size, "overlap": overlap, "seed": seed}
        alike |= {"checked": checked} | optimizer_options(optimizer, model) | same_everywhere(given.residency)
    names, method, part, stages, tensor, experts = names_of(mesh), given.method, None, None, None, None
    of_ranks: dict[str, Any] = {"seed": seed, "timeout_s": timeout_s, "checked": checked}
    of_island = " of this island" if isinstance(method, Connected) else ""
    rows: list[Row] = [(f"mesh{of_island}", shape_of(mesh), "axes from the outside in")]
    if "pipeline" in names:
        part, stages = cut_layers(model, optimizer, mesh, given, initial)
    if "tensor" in names:
        tensor, part = cut_matrices(model, optimizer, mesh, part)
        rows.append(tensor_row(model, tensor, timeout_s))
    axis = axis_of(mesh, tensor, part, stages)
    if axis is not None:
        local_size = node_inside(mesh, axis.whole, local_size)
    if axis is not None and given.experts is not None:
        check_optimizer(model, optimizer, given.experts)
        meter = Meter()
        experts = expert_parallel(
            model, given.experts, axis.whole, stride=stride_of(mesh, "expert"), local_size=local_size, meter=meter,
            **of_ranks,
        )  # fmt: skip
        axis = replace(axis, group_for=experts.group_for, meter=meter, parts=experts)
    if "island" in names and isinstance(method, IslandsMethod):
        method = method.connected_to(lambda: other_islands(mesh, timeout_s, checked))
    options = of_ranks | {"local_size": local_size} | ({} if axis is None else {"axis": axis})
    if given.residency is not None:
        options |= {"residency": given.residency, "initial": initial}
    module, parallel = apply(method, model, optimizer, overlap=overlap, **options)
    sharded = getattr(parallel, "inner", parallel)
    if experts is not None and isinstance(sharded, ShardedOptimizer):
        experts.follow(sharded)
    rows += share_sums(model, parallel.comm)
    if overlap and not parallel.overlaps:
        rows.append(("overlap", "no effect", "weights are whole when a step ends"))
    if part is not None:
        own = PipelineStage(part, mesh["pipeline"], parallel, tensor=tensor, **of_ranks)
        if stages is not None:
            stages.after_write = own.weights_written
        holders = holders_of(mesh, "pipeline")
        stage: Stage = PipelinedModel(model, parallel, rows, own, tensor, holders, announces=announce)
    else:
        sequence = None
        if "sequence" in names:
            sequence = sequence_parallel(
                model, given.sequence, None if axis is None else axis.whole, stride=stride_of(mesh, "sequence"),
                local_size=local_size, meter=parallel.meter, **of_ranks,
            )  # fmt: skip
            model.forward = sequence.forward_of(model)
        stage = Stage(module, parallel, rows, tensor, sequence, experts)
    if announce and mesh.get_rank() == 0:
        announce_table(stage.describe())
    return stage
