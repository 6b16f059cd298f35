"""Whether a mesh fits the model and the method: stages, tensor ranks, sequences, experts, islands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import gcd, prod
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.collectives.topology import Topology
from thinwire.device import choose as choose_device
from thinwire.errors import ConfigError, Problems
from thinwire.hosts.experts.checks import check_experts
from thinwire.hosts.ranks import along, neighbours
from thinwire.hosts.sequence.seams import attention_of
from thinwire.launch.check_parts import check_compiled
from thinwire.layout.mesh import MeshShape, check_beside
from thinwire.methods.experts import ExpertParallel, check_data_method, check_once
from thinwire.methods.pipeline.across import REPLICAS
from thinwire.methods.pipeline.cut import layers_of as layer_list
from thinwire.methods.pipeline.inside import check_inside
from thinwire.methods.pipeline.options import Pipeline, check_stages
from thinwire.methods.pipeline.recover import NONE
from thinwire.methods.sequence import check_strategy, choose_layout
from thinwire.models.hf import check_hf
from thinwire.models.llama import Llama
from thinwire.models.moe import MIXTURES
from thinwire.models.seam import experts_of
from thinwire.models.tensor import check_cut
from thinwire.options import MOE, PIPELINE, made, model_table
from thinwire.registry import check_on_mesh
from thinwire.run.config import AUTO, AXIS_FLAGS, TrainConfig, check_num_ranks, derive
from thinwire.run.run import Run, island_size
from thinwire.run.run_dir import RunDir
from thinwire.table import Row


def check_mesh(config: TrainConfig, run: Run | None) -> None:
    """Raise ConfigError for a mesh of another number of ranks, or one that strategy or model don't support."""
    shape, problems = config.mesh_shape, Problems()
    problems.note(check_num_ranks, config)
    if run is not None and config.mesh is not None:
        with problems.collect():
            check_islands(config, run)
    if shape.tensor > 1 and run is not None:
        with problems.collect():
            check_on_mesh(run.strategy)
    problems.raise_any()


def check_tensor(config: TrainConfig, model: nn.Module | None) -> None:
    """Raise ConfigError, with all reasons, for a tensor axis that does not fit the model or spans machines."""
    problems, size = Problems(), config.mesh_shape.tensor
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", config.workers))
    if config.world_size > machine and machine % size:
        problems.messages.append(
            f"a tensor axis of {size} ranks on machines of {machine}: its sums in each layer would cross the network; "
            f"nearest: --tensor {gcd(size, machine)}, or --stages {size}"
        )
    elif config.local_size is not None and config.local_size % size and config.local_size < config.world_size:
        problems.messages.append(
            f"--local-size {config.local_size}: a tensor axis of {size} ranks would span nodes, and its sums in each "
            f"layer cross the network; nearest: --local-size {size}"
        )
    problems.note(check_matrices, config, model, size)
    problems.raise_any()


def check_matrices(config: TrainConfig, model: nn.Module | None, size: int) -> None:
    """Raise ConfigError for a model whose matrices `size` ranks can't cut."""
    if config.model.startswith("hf:"):
        check_cut(check_hf(config.model.removeprefix("hf:"), 1, 1, {}), size)
    elif isinstance(model, Llama):
        check_cut(model.config, size)


def check_cuts(config: TrainConfig, model: nn.Module | None) -> None:
    """Raise ConfigError, with all reasons, for stages and tensor ranks that no mesh could make fit the model."""
    problems = Problems()
    if isinstance(config.stages, int) and config.stages > 1:
        problems.note(check_layers, config, made(Pipeline, sound_options(config), PIPELINE), config.stages, model)
    if isinstance(config.tensor, int) and config.tensor > 1:
        problems.note(check_matrices, config, model, config.tensor)
    problems.raise_any()


def check_layers(
    config: TrainConfig, options: Pipeline, stages: int, model: nn.Module | None, micro_batches: int | None = None
) -> None:
    """Raise ConfigError, with all reasons, for stages that do not fit the model, or a step of so many micro-batches."""
    num_layers: int | None = None
    stated = getattr(model, "config", None)
    if config.model.startswith("hf:"):
        stated = check_hf(config.model.removeprefix("hf:"), 1, 1, {})
        num_layers = getattr(stated, "num_hidden_layers", None)
    elif model is not None:
        num_layers = len(layer_list(model)[1])
    table = model_table(config.model)
    more_layers = f"--{table}.num-hidden-layers" if table else ""
    tensor = config.tensor if isinstance(config.tensor, int) and config.tensor > 0 else 1
    num_ranks = config.world_size // tensor if config.world_size % tensor == 0 else config.world_size
    check_stages(
        options, stages, num_layers, micro_batches, more_layers, getattr(stated, "hidden_size", None), num_ranks
    )


def sound_options(config: TrainConfig) -> Mapping[str, Any]:
    """The stated options of a pipeline; if they can't work together, those that can alone; if these can't, none."""
    stated = config.tables.get(PIPELINE, {})
    alone = {name: value for name, value in stated.items() if is_sound({name: value})}
    return next(options for options in (stated, alone, {}) if is_sound(options))


def is_sound(options: Mapping[str, Any]) -> bool:
    """Whether a pipeline can have these options."""
    with suppress(ConfigError):
        made(Pipeline, options, PIPELINE)
        return True
    return False


def check_pipeline(config: TrainConfig, run: Run, model: nn.Module | None) -> None:
    """Raise ConfigError, with all reasons, for stages that do not fit model, batch, mesh or strategy."""
    shape, problems = config.mesh_shape, Problems()
    if run.pipeline is None:
        return
    if config.compile:
        problems.messages.append("--compile: the layers of a pipeline's stages are not compiled; leave it out")
    batch = problems.note(derive, config, config.num_shares)
    accumulation = None if batch is None else batch.accumulation
    problems.note(check_layers, config, run.pipeline, shape.pipeline, model, accumulation)
    if run.recovers and config.minutes is not None:
        problems.messages.append(
            f"--minutes {config.minutes:g} with recover: a restarted process would choose another number of "
            f"steps; nearest: --steps {config.steps}"
        )
    problems.note(check_inside, run.strategy, shape.sizes["data"])
    problems.raise_any()


def check_choice(config: TrainConfig, run: Run, model: nn.Module | None) -> None:
    """Raise ConfigError, with all reasons, if the run can't choose its stages."""
    problems, what, stated = Problems(), f"--stages {config.stages}", "--stages 2"
    if config.mesh is not None or run.sequence is not None or config.mesh_shape.tensor > 1:
        problems.messages.append(
            f"{what} finds the mesh: leave --mesh, --tensor and --sequence.parallel out; or --tensor {AUTO}"
        )
    if run.has_islands:
        problems.messages.append(f"{what}: stages beside islands are not supported; nearest: --strategy sdp4bit")
    if type(model) is not Llama:
        problems.messages.append(f"{what} is for presets such as demo, and not for {config.model}; nearest: {stated}")
    if config.order or config.tables.get(PIPELINE, {}).get("across", AUTO) == REPLICAS:
        problems.messages.append(f"{what} finds the order of ranks: leave --order and --pipeline.across out")
    problems.note(check_own_plan, config, what)
    if run.recovers:
        why = "a restarted process would choose for itself"
        problems.messages.append(f"{what} with recover: {why}; nearest: --stages {config.world_size}")
    if config.compile:
        problems.messages.append(f"{what}: the layers of a pipeline's stages are not compiled; leave --compile out")
    problems.raise_any()


def check_planned_late(config: TrainConfig, model: nn.Module | None) -> None:
    """Raise ConfigError, with all reasons, if the run can't choose its strategy."""
    problems, what, stated = Problems(), f"--strategy {config.strategy}", "--strategy sdp4bit"
    if config.mesh is not None:
        fixed = [f"{AXIS_FLAGS[axis]} {size}" for axis, size in config.mesh_shape.sizes.items() if axis in AXIS_FLAGS]
        near = " ".join(flag for flag in fixed if not flag.endswith(" 1")) or "leave --mesh out"
        problems.messages.append(f"--mesh {config.mesh}: {what} finds the mesh, and keeps single axes; nearest: {near}")
    if config.order:
        order = " ".join(map(str, config.order))
        problems.messages.append(f"--order {order}: {what} finds the order of ranks; nearest: leave --order out")
    if config.inner is not None:
        problems.messages.append(f"{what} chooses no islands; nearest: --strategy diloco --inner {config.inner}")
    if not isinstance(model, Llama):
        problems.messages.append(f"{what} is for presets such as demo, and not for {config.model}; nearest: {stated}")
    if config.tables.get(PIPELINE, {}).get("recover", NONE) != NONE:
        problems.messages.append(f"{what} with recover: a restarted process can't choose; nearest: {stated}")
    if config.tables.get(PIPELINE, {}).get("across", AUTO) == REPLICAS:
        problems.messages.append(f"{what} finds an order in which stages cross nodes: leave --pipeline.across out")
    if config.compile:
        problems.messages.append(f"{what} may cut the model into stages, which are not compiled; nearest: {stated}")
    problems.note(check_own_plan, config, what)
    problems.raise_any()


def check_own_plan(config: TrainConfig, what: str) -> None:
    """Raise ConfigError, with all reasons, for options beside a plan that the run makes. what: asks for that."""
    problems = Problems()
    if config.plan and Path(config.plan).absolute() != RunDir(config.run_dir).plan.absolute():
        problems.messages.append(
            f"--plan {config.plan}: {what} makes a plan of its own; leave one of both out, or train the plan.toml "
            "beside that file"
        )
    with problems.collect():
        on_gpu = choose_device(config.device, int(os.environ.get("LOCAL_WORLD_SIZE", config.workers)))[0] == "cuda"
        if on_gpu and config.memory is not None:
            problems.messages.append(
                f"--memory {config.memory} with {what}: it bounds a process, and a plan for GPUs knows of their memory "
                "alone; nearest: leave --memory out, or --device cpu"
            )
    problems.raise_any()


def check_order(config: TrainConfig, run: Run) -> None:
    """Raise ConfigError for an order that separates the ranks of a machine, or for islands, which take no order."""
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", config.workers))
    parts = [list(config.order[first : first + machine]) for first in range(0, len(config.order), machine)]
    if any(part != list(range(part[0], part[0] + machine)) or part[0] % machine for part in parts):
        raise ConfigError(
            f"--order {' '.join(map(str, config.order))}: ranks of one machine, here {machine}, stay together and in "
            "their own order; nearest: leave --order out"
        )
    if config.order and run.has_islands:
        raise ConfigError("--order: islands take no order; leave it out")


def axes_of(shape: MeshShape, run: Run) -> set[str]:
    """The axes over which the run cuts anything, and that of islands where its nodes are islands."""
    return shape.cut | ({"island"} if run.has_islands else set())


def check_sequence(config: TrainConfig, run: Run, model: nn.Module) -> None:
    """Raise ConfigError, with all reasons, for sequences over ranks that do not fit model, mesh or strategy."""
    shape, problems = config.mesh_shape, Problems()
    if run.sequence is None:
        return
    problems.note(check_beside, "sequence", axes_of(shape, run))
    with problems.collect():
        machine = config.local_size or config.workers
        choose_layout(run.sequence, attention_of(model, config.seq_len), gcd(machine, shape.sequence))
    with problems.collect():
        if not run.has_islands:
            check_strategy(run.strategy)
    problems.raise_any()


def check_expert_ranks(config: TrainConfig, run: Run, model: nn.Module) -> None:
    """Raise ConfigError, with all reasons, for experts over ranks that do not fit model, mesh or strategy."""
    shape, problems = config.mesh_shape, Problems()
    if run.experts is None:
        return
    problems.note(check_beside, "expert", axes_of(shape, run) | ({"pipeline"} if config.chooses_stages else set()))
    if config.finds_expert_ranks and config.mesh is not None:
        problems.messages.append("--experts.parallel auto finds the expert axis: leave --mesh out")
    if config.chooses_experts and run.has_islands:
        problems.messages.append("--experts.* auto beside islands: not supported; nearest: state them")
    with problems.collect():
        experts_of(model, f"--model {config.model}")
        check_experts(model, run.experts, shape.island_size or shape.world_size)
    problems.note(check_data_method, run.strategy)
    problems.note(check_nodes, config, run.experts)
    problems.raise_any()


def check_nodes(config: TrainConfig, experts: ExpertParallel) -> None:
    """Raise ConfigError if an expert that rows reach once in a node lies on several nodes."""
    shape = config.mesh_shape
    axes = list(shape.sizes)
    stride = prod(size for axis, size in shape.sizes.items() if "expert" in axes[: axes.index(axis)])
    # Islands have their own nodes.
    grid = Topology.stated(config.world_size, shape.island_size or config.local_size or config.workers)
    check_once(experts.route, experts.slices, shape.expert, along(grid, neighbours(0, shape.expert, stride)))


def capacity_rows(config: TrainConfig) -> list[Row]:
    """Rows about the capacity of a mixture, if it has one. Raises ConfigError for a capacity below one row."""
    if config.model not in MIXTURES:
        return []
    batch, mixture = derive(config, config.num_shares), replace(MIXTURES[config.model], **config.tables.get(MOE, {}))
    return mixture.capacity_rows(batch.micro_batch * -(-config.seq_len // config.mesh_shape.sequence))


def check_islands(config: TrainConfig, run: Run) -> None:
    """Raise ConfigError if the mesh has islands and the strategy has none, or the other way round."""
    shape = config.mesh_shape
    size = shape.island_size
    if size is not None and not run.has_islands:
        raise ConfigError(
            f"--mesh {config.mesh}: strategy {config.strategy} has no islands; nearest: --strategy diloco --inner "
            f"{config.strategy}, or --mesh {shape.without_islands()}"
        )
    if size is None and run.has_islands:
        raise ConfigError(
            f"--mesh {config.mesh}: strategy {config.strategy} trains islands, and the mesh has no island axis; "
            f"nearest: --mesh {MeshShape({'island': 1, **shape.sizes})}, or --local-size instead of --mesh"
        )
    if size is not None and config.local_size not in (None, size):
        raise ConfigError(
            f"--local-size {config.local_size}: an island of --mesh {config.mesh} has {size} ranks; nearest: leave "
            "--local-size out"
        )


def check_grid(config: TrainConfig, run: Run | None) -> None:
    """Raise ConfigError for ranks that form no grid, or a grid on which the strategy can't run with any model."""
    of_node = island_size(config) if run and run.has_islands else config.local_size or config.workers
    topology = Topology.stated(config.world_size, of_node)
    if run is not None:
        run.strategy.plan(nn.Module(), topology, 1)
        check_compiled(config, run.strategy, topology)
