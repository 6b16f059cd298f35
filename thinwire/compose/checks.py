"""Why methods, model, optimizer and mesh can't go together: all reasons at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from thinwire.compose.meshes import names_of, places_of, shape_of, sizes_of
from thinwire.errors import ConfigError, Problems
from thinwire.hosts.arguments import check_instance
from thinwire.hosts.experts.checks import check_experts
from thinwire.hosts.offload.hollow import is_hollow
from thinwire.hosts.sequence.seams import attention_of, is_hugging_face
from thinwire.hosts.tensor import misfits
from thinwire.layout.mesh import AXES, check_axis, check_beside
from thinwire.methods.experts import ExpertParallel, check_data_method
from thinwire.methods.interface import Method
from thinwire.methods.outer.base import Connected, IslandsMethod
from thinwire.methods.pipeline.across import check_across
from thinwire.methods.pipeline.cut import layers_of
from thinwire.methods.pipeline.inside import check_inside, check_recovers, check_spread
from thinwire.methods.pipeline.options import Pipeline, check_stages
from thinwire.methods.sequence import SequenceParallel, check_strategy, choose_layout
from thinwire.models.moe import check_axes
from thinwire.optim import SummingOptimizer
from thinwire.registry import check_on_mesh


def checked_method(
    model: nn.Module,
    mesh: DeviceMesh,
    methods: Sequence[Method | Connected],
    pipelines: Sequence[Pipeline] = (),
    sequences: Sequence[SequenceParallel] = (),
    experts: Sequence[ExpertParallel] = (),
    *,
    is_filled: bool,
) -> Method | Connected:
    """The method of the data axis; if there is an island axis, that method wrapped by the islands'.

    is_filled: parameters without memory get their first values. Raises ConfigError that lists everything that does not
    fit. Changes nothing and sends nothing.
    """
    problems, names = Problems(), names_of(mesh)
    if len(names) != mesh.ndim:
        raise ConfigError(f"the mesh has no names: give init_device_mesh mesh_dim_names, of {', '.join(AXES)}")
    for name in names:
        with problems.collect():
            check_axis(name)
    if "data" not in names:
        problems.messages.append(f"the mesh {shape_of(mesh)} has no data axis: add one, of 1 rank if need be")
    method: Method | Connected | None = None
    with problems.collect():
        method = composed(methods, mesh)
    if method is not None and ("tensor" in names or mesh.size() < dist.get_world_size()):
        with problems.collect():
            check_on_mesh(method.method if isinstance(method, Connected) else method)
    problems.messages += pipeline_problems(model, mesh, method, pipelines)
    if method is not None and "pipeline" in names:
        problems.note(check_recovers, (*pipelines, Pipeline())[0], method, sizes_of(mesh))
        problems.note(check_spread, (*pipelines, Pipeline())[0], method, sizes_of(mesh))
    problems.note(check_axes, model, sizes_of(mesh))
    problems.messages += sequence_problems(model, mesh, method, sequences)
    problems.messages += expert_problems(model, mesh, method, experts)
    if "tensor" in names:
        problems.messages += misfits(model, mesh["tensor"])
    elif foreign := next((name for name, param in model.named_parameters() if isinstance(param, DTensor)), None):
        problems.messages.append(
            f"{foreign!r} is a DTensor, and the mesh {shape_of(mesh)} has no tensor axis: a model of fully_shard is "
            "compressed by thinwire.compress_fsdp; one of parallelize_module needs the axis 'tensor'"
        )
    if meta := next((name for name, param in model.named_parameters() if param.is_meta), None):
        problems.messages.append(
            f"{meta!r} is on the meta device: call model.to_empty(device=...) and fill it first, or call "
            "thinwire.hollow(model) and give `initial`, with a pipeline axis or a Residency"
        )
    if not is_filled and (empty := next((name for name, param in model.named_parameters() if is_hollow(param)), None)):
        problems.messages.append(
            f"{empty!r} has no memory: give `initial`, its first values, with a pipeline axis or a Residency; nearest: "
            "thinwire.zero(..., initial=...)"
        )
    problems.raise_any()
    assert method is not None
    return method


def axis_problems(axis: str, options: Sequence[object], mesh: DeviceMesh, with_axis: str) -> Iterator[str]:
    """Yield why the options of an axis that cuts the model don't fit a mesh. with_axis: a mesh that would fit."""
    names = names_of(mesh)
    if axis not in names:
        if options:
            yield (
                f"{type(options[0]).__name__} works on the {axis} axis, and the mesh {shape_of(mesh)} has none; "
                f"nearest: {with_axis}"
            )
        return
    if len(options) > 1:
        yield f"the {axis} axis takes one {type(options[0]).__name__}"
    problems = Problems()
    problems.note(check_beside, axis, names)
    yield from problems.messages


def pipeline_problems(
    model: nn.Module, mesh: DeviceMesh, method: Method | Connected | None, pipelines: Sequence[Pipeline]
) -> list[str]:
    """Reasons why a pipeline axis does not fit model, mesh and method, one message each; empty if it fits."""
    sizes = sizes_of(mesh)
    problems = Problems(axis_problems("pipeline", pipelines, mesh, f"pipeline=1,{shape_of(mesh)}"))
    if "pipeline" not in sizes:
        return problems.messages
    options = (*pipelines, Pipeline())[0]
    with problems.collect():
        check_stages(options, sizes["pipeline"], len(layers_of(model)[1]))
    problems.note(check_across, options.across, places_of(mesh))
    if method is not None:
        problems.note(check_inside, method, sizes.get("data", 1))
    return problems.messages


def sequence_problems(
    model: nn.Module, mesh: DeviceMesh, method: Method | Connected | None, options: Sequence[SequenceParallel]
) -> list[str]:
    """Reasons why a sequence axis does not fit model, mesh and method, one message each; empty if it fits."""
    sizes, ranks = sizes_of(mesh), (*options, SequenceParallel())[0].parallel
    problems = Problems(axis_problems("sequence", options, mesh, f"{shape_of(mesh)},sequence={ranks}"))
    if "sequence" not in sizes:
        return problems.messages
    if is_hugging_face(model):
        problems.messages.append(
            f"{type(model).__name__} on a sequence axis: the model is called as model(tokens, targets); nearest: "
            "HFCausalLM(model, max_seq_len) of thinwire.models.hf, or thinwire.sequence_parallel in a loop of your own"
        )
    with problems.collect():
        asked = replace((*options, SequenceParallel())[0], parallel=sizes["sequence"])
        # How the ranks lie on nodes is found later; only stated methods depend on it.
        choose_layout(asked, attention_of(model, 1), 1)
    if method is not None:
        problems.note(check_strategy, method)
    return problems.messages


def spreads_experts(mesh: DeviceMesh, options: Sequence[ExpertParallel]) -> bool:
    """Whether the expert axis of a mesh changes anything: one rank without options does not."""
    ranks = sizes_of(mesh).get("expert", 0)
    return ranks > 1 or bool(ranks and options)


def with_ranks(options: ExpertParallel, mesh: DeviceMesh) -> ExpertParallel:
    """The options, with `parallel` set to the length of the mesh's expert axis."""
    return replace(options, parallel=mesh["expert"].size())


def expert_problems(
    model: nn.Module, mesh: DeviceMesh, method: Method | Connected | None, options: Sequence[ExpertParallel]
) -> list[str]:
    """Reasons why an expert axis does not fit model, mesh and method, one message each; empty if it fits."""
    sizes, ranks = sizes_of(mesh), (*options, ExpertParallel())[0].parallel
    problems = Problems(axis_problems("expert", options, mesh, f"{shape_of(mesh)},expert={ranks}"))
    if not spreads_experts(mesh, options):
        return problems.messages
    with problems.collect():
        check_experts(model, with_ranks((*options, ExpertParallel())[0], mesh), sizes["expert"])
    if method is not None:
        problems.note(check_data_method, method)
    return problems.messages


def composed(methods: Sequence[Method | Connected], mesh: DeviceMesh) -> Method | Connected:
    """One method made of all: that of the data axis becomes the `inner` of an islands method. Raises ConfigError."""
    for method in methods:
        check_instance(method)
    outer = [method for method in methods if isinstance(method, IslandsMethod | Connected)]
    inner = [method for method in methods if not isinstance(method, IslandsMethod | Connected)]
    given, has_islands = ", ".join(type(method).__name__ for method in methods) or "none", "island" in names_of(mesh)
    kept = f"thinwire.{type(inner[0]).__name__ if inner else 'Zero'}()"
    if has_islands and (len(outer) != 1 or isinstance(outer[0], Connected)):
        raise ConfigError(
            f"the island axis takes one method of islands, not {given}; nearest: [thinwire.DiLoCo(), {kept}], "
            "or a mesh without that axis"
        )
    if not has_islands and (of_islands := next((one for one in outer if isinstance(one, IslandsMethod)), None)):
        raise ConfigError(
            f"{type(of_islands).__name__} works on the island axis, and the mesh {shape_of(mesh)} has none; nearest: "
            f"island=1,{shape_of(mesh)}" + (f", or [{kept}] alone" if inner else "")
        )
    if len(inner) > 1 or len(methods) > 1 + has_islands or not methods:
        raise ConfigError(f"the data axis takes one method, not {given}; nearest: [{kept}]")
    if not outer:
        return inner[0]
    (islands,) = outer
    if not inner or isinstance(islands, Connected):
        return islands
    if islands.inner not in (type(islands)().inner, inner[0]):
        raise ConfigError(
            f"two methods for the data axis, {type(islands.inner).__name__} as inner= and {type(inner[0]).__name__}; "
            "nearest: leave inner= out"
        )
    return replace(islands, inner=inner[0])


def check_joint(optimizer: torch.optim.Optimizer, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError for an optimizer that looks across all parameters, where ranks of an axis have others."""
    parts = [axis for axis in ("pipeline", "expert") if sizes.get(axis, 1) > 1]
    if isinstance(optimizer, SummingOptimizer) and optimizer.is_joint and parts:
        raise ConfigError(
            f"{type(optimizer).__name__} looks across all parameters, of which ranks of the {parts[0]} axis have "
            "others; nearest: AdamW, or thinwire.Muon"
        )
