"""Checks everything that can be wrong before a process starts, and does once what every worker would do."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire import _compat
from thinwire.checkpoint import CheckpointError, choose, latest, passed_over, step_of
from thinwire.checkpoint.folder import Manifest
from thinwire.codecs import warm
from thinwire.collectives import faults
from thinwire.collectives.topology import Topology
from thinwire.data import documents, load_tokenizer
from thinwire.data.loader import count_sequences
from thinwire.device import choose as choose_device
from thinwire.errors import ConfigError, Problems, counted
from thinwire.hosts.experts.parallel import check_experts
from thinwire.hosts.offload.tiling import tiled_shapes
from thinwire.hosts.sequence.seams import heads_of
from thinwire.launch.apart import apart
from thinwire.launch.machine import choose_dtype, free_port, port_is_free, threads_per_worker
from thinwire.launch.start import Start
from thinwire.layout.layers import layers_of
from thinwire.layout.mesh import MeshShape, check_beside
from thinwire.losses import head_of, loss_in_effect
from thinwire.methods.experts import check_data_method
from thinwire.methods.interface import Method
from thinwire.methods.memory import Floor, Residency, check_across, check_at_once, check_outer, resident_method
from thinwire.methods.pipeline.across import REPLICAS
from thinwire.methods.pipeline.cut import SPREAD, layers_of as layer_list
from thinwire.methods.pipeline.inside import check_inside, check_recovers, check_spread
from thinwire.methods.pipeline.options import Pipeline, check_stages
from thinwire.methods.pipeline.recover import NONE
from thinwire.methods.sequence import Shape, check_strategy, choose_layout
from thinwire.models import build_model, build_skeleton
from thinwire.models.distil import check_alike
from thinwire.models.hf import check_hf, look_into
from thinwire.models.kept import is_pruned
from thinwire.models.llama import Llama
from thinwire.models.moe import MIXTURES, check_axes
from thinwire.models.tensor import check_cut
from thinwire.optim import JOINT, NAMED, WHOLE
from thinwire.options import (
    EXPERTS,
    LAYOUT_TABLES,
    LLAMA,
    MOE,
    PIPELINE,
    RESIDENCY,
    check_unused,
    has_islands,
    model_table,
)
from thinwire.registry import check_on_mesh
from thinwire.report.metrics import read_metrics
from thinwire.report.progress import Progress
from thinwire.report.trackers import check_trackers
from thinwire.run.config import AUTO, FIXED_ON_RESUME, TrainConfig, check_num_ranks, derive, range_errors, with_derived
from thinwire.run.effects import batch_row, late_rows, pipeline_rows, rate_row, resume_rows, sparse_rows, unused_rows
from thinwire.run.optimizer import limits_itself, name_of
from thinwire.run.residency import resolved
from thinwire.run.run import Run, island_size, tables_in_effect, tokens_of
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import parse_toml, read_toml, to_toml
from thinwire.table import Row, sent_row
from thinwire.tiers import check_folder
from thinwire.training.clock import choose_model
from thinwire.training.planned import read_plan


def check(config: TrainConfig, problems: Problems) -> Run | None:
    """Build the run, and note every reason why it can't start. Writes nothing. None if the run can't be built."""
    wrong_numbers = list(range_errors(config))
    problems.messages += wrong_numbers
    run = problems.note(Run.of, config)
    if not wrong_numbers:
        with problems.collect():
            check_mesh(config, run)
            derive(config, config.num_shares)
            if run is not None:
                check_order(config, run)
        problems.note(check_grid, config, run)
    if run is not None:
        problems.note(check_minutes, config, run)
        for table in sorted(config.tables.keys() - run.used_tables):
            problems.note(check_unused, table, config.tables[table])
    problems.note(device_of, config, run)
    problems.note(check_trackers, config.track)
    with problems.collect():
        RunDir(config.run_dir).check(config.node, resume=config.resume, overwrite=config.overwrite)
    for text in config.inject:
        problems.note(check_fault, text, config)
    problems.note(check_join, config)
    if config.plan and config.node == 0:
        problems.note(read_plan, config)
    problems.note(check_data, config)
    with problems.collect():
        model = check_model(config)
        if run is not None and model is not None:
            run.strategy.check_model(model)
        if model is not None:
            check_axes(model, config.mesh_shape.sizes)
        if config.mesh_shape.tensor > 1:
            problems.note(check_tensor, config, model)
        if config.tensor == AUTO and not config.chooses_stages:
            raise ConfigError(f"--tensor {AUTO} is found beside the stages; nearest: --stages {AUTO} --tensor {AUTO}")
        if config.is_planned_late:
            check_planned_late(config, model)
        elif run is not None and not wrong_numbers and config.chooses_stages:
            check_choice(config, run, model)
        elif run is not None and not wrong_numbers:
            check_pipeline(config, run, model)
            if run.pipeline is not None:
                check_recovers(run.pipeline, run.strategy, config.mesh_shape.sizes)
                check_spread(run.pipeline, run.strategy, config.mesh_shape.sizes)
        if run is not None and not wrong_numbers and model is not None:
            check_sequence(config, run, model)
            check_expert_ranks(config, run, model)
            capacity_rows(config)
        if run is not None and not wrong_numbers and model is not None:
            check_residency(config, run, model)
    problems.note(check_teacher, config, run)
    problems.note(check_documents, config)
    return run


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
    if config.model.startswith("hf:"):
        problems.note(check_cut, check_hf(config.model.removeprefix("hf:"), 1, 1, {}), size)
    elif isinstance(model, Llama):
        problems.note(check_cut, model.config, size)
    problems.raise_any()


def check_pipeline(config: TrainConfig, run: Run, model: nn.Module | None) -> None:
    """Raise ConfigError, with all reasons, for stages that do not fit model, batch, mesh or strategy."""
    shape, problems = config.mesh_shape, Problems()
    if run.pipeline is None:
        return
    if config.compile:
        problems.messages.append("--compile: the layers of a pipeline's stages are not compiled; leave it out")
    num_layers = None if model is None else len(layer_list(model)[1])
    more_layers = "--llama.num-hidden-layers" if LLAMA in run.used_tables else ""
    with problems.collect():
        accumulation = derive(config, config.num_shares).accumulation
        check_stages(run.pipeline, shape.pipeline, num_layers, accumulation, more_layers)
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
    if config.memory is not None or config.store is not None:
        problems.messages.append(f"{what} takes what fits into the machine: leave --memory and --store out")
    if run.recovers:
        why = "a restarted process would choose for itself"
        problems.messages.append(f"{what} with recover: {why}; nearest: --stages {config.world_size}")
    if config.compile:
        problems.messages.append(f"{what}: the layers of a pipeline's stages are not compiled; leave --compile out")
    problems.raise_any()


def check_planned_late(config: TrainConfig, model: nn.Module | None) -> None:
    """Raise ConfigError, with all reasons, if the run can't choose its strategy."""
    problems, what, stated = Problems(), f"--strategy {config.strategy}", "--strategy sdp4bit"
    if config.mesh is not None or config.order or max(config.sequence or 1, config.mesh_shape.tensor) > 1:
        problems.messages.append(
            f"{what} finds mesh and order: leave --mesh, --tensor, --order and --sequence.parallel out"
        )
    if config.inner is not None:
        problems.messages.append(f"{what} chooses no islands; nearest: --strategy diloco --inner {config.inner}")
    if type(model) is not Llama:
        problems.messages.append(f"{what} is for presets such as demo, and not for {config.model}; nearest: {stated}")
    if config.tables.get(PIPELINE, {}).get("recover", NONE) != NONE:
        problems.messages.append(f"{what} with recover: a restarted process can't choose; nearest: {stated}")
    if config.tables.get(PIPELINE, {}).get("across", AUTO) == REPLICAS:
        problems.messages.append(f"{what} finds an order in which stages cross nodes: leave --pipeline.across out")
    if config.memory is not None or config.store is not None:
        problems.messages.append(
            f"{what} takes what fits into the machine: leave --memory and --store out; nearest: {stated}"
        )
    if config.compile:
        problems.messages.append(f"{what} may cut the model into stages, which are not compiled; nearest: {stated}")
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
        heads, kv_heads, width, _ = heads_of(model)
        machine = config.local_size or config.workers
        choose_layout(run.sequence, Shape(heads, kv_heads, width, config.seq_len), gcd(machine, shape.sequence))
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
    problems.note(check_experts, model, run.experts, shape.island_size or shape.world_size)
    problems.note(check_data_method, run.strategy)
    problems.raise_any()


def capacity_rows(config: TrainConfig) -> list[Row]:
    """Rows about the capacity of a mixture, if it has one. Raises ConfigError for a capacity below one row."""
    if config.model not in MIXTURES:
        return []
    batch, mixture = derive(config, config.num_shares), replace(MIXTURES[config.model], **config.tables.get(MOE, {}))
    return mixture.capacity_rows(batch.micro_batch * -(-config.seq_len // config.mesh_shape.sequence))


def check_residency(config: TrainConfig, run: Run, model: nn.Module) -> None:
    """Raise ConfigError, with all reasons, for what can't lie on a disk, and for a budget or disk that is too small."""
    residency, problems = run.residency, Problems()
    if residency is None:
        return
    axes = {name for name, size in config.mesh_shape.sizes.items() if size > 1}
    resident_method(run.strategy, axes)
    problems.note(check_outer, residency, run.strategy)
    optimizer = name_of(run.config.optimizer or "")
    if optimizer in (*NAMED, *JOINT) and residency.optimizer != "memory":
        with problems.collect():
            check_across(residency, optimizer, streams=True)
    elif optimizer in WHOLE and residency.optimizer != "memory":
        problems.messages.append(
            f"residency: {optimizer} looks across matrices, and from a disk it gets pieces; nearest: adamw"
        )
    with problems.collect():
        check_tile(config, run, residency, model)
    with problems.collect():
        limits = limits_itself(run.config.optimizer or "")
        check_at_once(residency, optimizer, limits=limits, max_norm=config.grad_clip)
    problems.raise_any()
    residency, setup = resolved(run, model)
    floor = Floor.of(residency, setup)
    if config.compile and (
        residency.weights == "disk" or residency.activations not in ("auto", "keep") or residency.tile is not None
    ):
        what = "weights or activations that come and go, samples of them, or tiles,"
        problems.messages.append(f"--compile: {what} can't be compiled; leave it out")
    micro_batch = derive(config, config.num_shares).micro_batch
    if residency.is_sliced and config.documents:
        problems.messages.append(
            "--slices with --documents: the bounds of documents are those of a whole batch; leave one of both out"
        )
    elif residency.is_sliced and residency.slices is not None and residency.slices > micro_batch:
        problems.messages.append(
            f"--slices {residency.slices}: a micro-batch has {micro_batch} sequences; nearest: --slices {micro_batch}"
        )
    problems.note(floor.check, residency.memory_bytes)
    if floor.disk:
        num_here = int(os.environ.get("LOCAL_WORLD_SIZE", config.workers))
        problems.note(check_folder, residency.folder, num_here * floor.disk)
    problems.raise_any()


def check_tile(config: TrainConfig, run: Run, residency: Residency, model: nn.Module) -> None:
    """Raise ConfigError for tiles that there can't be. model: only its shapes are used."""
    if residency.tile is None:
        return
    optimizer, topology = (
        name_of(run.config.optimizer or ""),
        Topology.stated(config.world_size, config.local_size or config.workers),
    )
    if optimizer in (*NAMED, *JOINT, *WHOLE):
        raise ConfigError(f"tile: {optimizer} looks across matrices, and a tile would be one to it; nearest: adamw")
    if resident_method(run.strategy).levels(topology).weights_over > 1:
        raise ConfigError(f"tile: {config.strategy} gathers weights by layers, whole; nearest: --strategy sdp4bit")
    shapes = tiled_shapes(model, residency.tile)
    if loss_of(config)[0] == "cut":
        head = model.lm_head if isinstance(model, Llama) else head_of(model)
        name = next(name for name, module in model.named_modules() if module is head)
        # Raises if the logits of a tile are none.
        getattr(shapes.get_submodule(name), "strips", None)


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


def device_of(config: TrainConfig, run: Run | None) -> tuple[str, str]:
    """The kind of device on which each worker of this machine trains, and the reason.

    Raises ConfigError if impossible.
    """
    if run is not None and run.strategy.cpu_only:
        if config.device == "cuda":
            raise ConfigError(f"--device cuda: strategy {config.strategy} runs on the CPU alone; nearest: --device cpu")
        return "cpu", f"strategy {config.strategy} runs on the CPU alone"
    return choose_device(config.device, int(os.environ.get("LOCAL_WORLD_SIZE", config.workers)))


def check_compiled(config: TrainConfig, strategy: Method, topology: Topology) -> None:
    """Raise ConfigError if torch.compile can't work: weights come and go with a layer, or there is no compiler."""
    if not config.compile:
        return
    if why := strategy.not_compiled(topology):
        raise ConfigError(f"--compile: {strategy.name} {why}; nearest that can: sdp4bit, zero or ddp")
    if config.mesh_shape.tensor > 1:
        raise ConfigError(f"--compile: --mesh {config.mesh} cuts matrices inside of a layer; leave one of the two out")
    if problem := _compat.compiler_problem(device_of(config, None)[0]):
        raise ConfigError(f"--compile: {problem}; leave it out")


def check_minutes(config: TrainConfig, run: Run) -> None:
    """Raise ConfigError for --minutes in a run whose first steps can't be repeated."""
    if config.minutes is None:
        return
    if why := run.strategy.not_measured:
        raise ConfigError(f"--minutes {config.minutes:g}: {config.strategy} {why}; nearest: --steps {config.steps}")


def check_fault(text: str, config: TrainConfig) -> None:
    """Raise ConfigError for a fault that can't be read, or that can't fire in this run."""
    fault, num_ranks, stages = faults.parse(text), config.world_size, config.mesh_shape.pipeline
    if fault.stage is not None and fault.stage >= stages:
        raise ConfigError(f"--inject {text!r}: stages are numbered from 0 to {stages - 1}")
    if not has_islands(config.strategy):
        if fault.island is not None:
            raise ConfigError(f"--inject {text!r}: strategy {config.strategy} has no islands; name a rank")
    else:
        num_ranks = island_size(config)
        num_islands = config.world_size // num_ranks
        if fault.island is None:
            raise ConfigError(f"--inject {text!r}: name the island too, such as island=0; ranks count inside of it")
        if fault.island >= num_islands:
            raise ConfigError(f"--inject {text!r}: islands are numbered from 0 to {num_islands - 1}")
    if fault.rank is not None and fault.rank >= num_ranks:
        raise ConfigError(f"--inject {text!r}: ranks are numbered from 0 to {num_ranks - 1}")
    if fault.step is not None and fault.step > config.steps and config.minutes is None:
        raise ConfigError(f"--inject {text!r}: the run ends after step {config.steps}")


def fault_row(text: str, run: Run) -> Row:
    """A row that says what an injected fault will do."""
    kind = faults.parse(text).kind
    ends = kind == "kill" and run.config.mesh_shape.pipeline > 1 and not run.recovers and not run.has_islands
    more = ", and with it the run: --pipeline.recover average would go on without a stage" if ends else ""
    return f"--inject {text!r}", "armed", faults.KINDS[kind] + more


def check_data(config: TrainConfig) -> None:
    """Read the first document. A dataset on the network is read later, when it is tokenised."""
    if not config.data.startswith("hf:"):
        next(documents(config.data, config.text_field), None)


def check_model(config: TrainConfig) -> nn.Module | None:
    """The model without memory.

    Of a transformers model only the config is checked, unless its experts lie on several ranks, or a part of it on a
    disk.
    """
    problems = Problems()
    tokenizer = problems.note(load_tokenizer, config.tokenizer)
    if config.model.startswith("hf:") and config.seq_len > 0:
        vocab_size = 1 if tokenizer is None else tokenizer.vocab_size
        problems.note(check_hf, config.model.removeprefix("hf:"), vocab_size, config.seq_len, {})
    problems.raise_any()
    if tokenizer is None or config.seq_len <= 0:
        return None
    if config.model.startswith("hf:"):
        asks = EXPERTS in config.tables or config.mesh_shape.expert > 1 or RESIDENCY in tables_in_effect(config)
        return build_skeleton(config.model, tokenizer.vocab_size, config.seq_len) if asks else None
    with torch.device("meta"):
        return build_model(
            config.model,
            tokenizer.vocab_size,
            config.seq_len,
            config.seed,
            config.tables.get(model_table(config.model) or ""),
        )


def check_teacher(config: TrainConfig, run: Run | None) -> None:
    """Raise ConfigError, with all reasons, for a teacher that can't run in every forward of the model."""
    problems = Problems()
    if config.teacher is None:
        if config.teacher_weight is not None:
            raise ConfigError("--teacher-weight without --teacher: name the teacher, as hf:DIR")
        return
    if not config.teacher.startswith("hf:"):
        raise ConfigError(f"--teacher {config.teacher}: must be hf:DIR, a folder of a mixture of experts")
    sizes = load_tokenizer(config.tokenizer).vocab_size, config.seq_len
    with problems.collect():
        teacher = build_skeleton(config.teacher, *sizes)
        with suppress(ConfigError):
            # Whatever is wrong with the model itself is told elsewhere.
            model = build_skeleton(config.model, *sizes, config.tables.get(model_table(config.model) or ""))
            problems.note(check_alike, model, teacher)
    axes = {"pipeline", "expert", "sequence", "tensor", "island"} & config.mesh_shape.sizes.keys()
    is_late = config.chooses_experts or config.chooses_stages or config.is_planned_late
    if axes or is_late or (run is not None and run.has_islands):
        problems.messages.append(
            "--teacher beside islands, stages, or an axis but data: not supported; leave one of both out"
        )
    if config.compile or config.memory is not None or config.store is not None:
        problems.messages.append("--teacher with --compile, --memory or --store: not supported; leave one of both out")
    problems.raise_any()


def check_documents(config: TrainConfig) -> None:
    """Raise ConfigError, with all reasons, for documents that can't be kept apart."""
    if not config.documents:
        return
    problems, shape = Problems(), config.mesh_shape
    tokenizer = problems.note(load_tokenizer, config.tokenizer)
    wrong = {
        f"--tokenizer {config.tokenizer}: has no token for the end of a document": tokenizer is not None
        and tokenizer.end_of_document is None,
        f"--model {config.model}: only thinwire's own models keep documents apart": config.model.startswith("hf:"),
        "stages: they pass tokens and targets on, and no documents": shape.pipeline > 1
        or config.chooses_stages
        or config.is_planned_late,
        "--teacher: it is asked about whole sequences": config.teacher is not None,
        "--compile: every batch has other documents": config.compile,
    }
    problems.messages += [f"--documents beside {what}; leave one of both out" for what, is_so in wrong.items() if is_so]
    problems.raise_any()


def check_join(config: TrainConfig) -> None:
    """Raise ConfigError for a malformed address, or if node 0's port is in use."""
    if config.join is None:
        return
    host, _, port = config.join.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--join {config.join}: must be HOST:PORT, such as 192.168.1.10:29500")
    if config.node == 0 and not port_is_free(int(port)):
        raise ConfigError(
            f"--join {config.join}: port {port} is in use on this machine; take another, the same on all machines, "
            f"such as {free_port()}"
        )


def model_rows(config: TrainConfig) -> list[Row]:
    """Rows about the source of a transformers model's weights."""
    if not config.model.startswith("hf:"):
        return []
    folder = Path(config.model.removeprefix("hf:")).expanduser()
    if look_into(folder):
        rows = [(f"--model {config.model}", "starts from the folder's weights", "")]
        if is_pruned(folder):
            rows.append((f"--model {config.model}", "trains the kept values alone", "the folder says which are kept"))
        num, known = load_tokenizer(config.tokenizer).vocab_size, check_hf(str(folder), 1, 1, {}).vocab_size
        if 2 * num < known:
            own = folder / "tokenizer.json"
            why = "its weights were trained with another tokenizer" + (
                f"; nearest: --tokenizer {own}" if own.exists() else ""
            )
            rows.append((f"--tokenizer {config.tokenizer}", f"uses {num:,} of the model's {known:,} words", why))
        return rows
    return [(f"--model {config.model}", "starts at random", "the folder holds no .safetensors file")]


def resolve(run: Run, asked: TrainConfig, threads: int) -> tuple[Run, list[Row]]:
    """The run with all derived values filled in, and the rows that say so."""
    batch = derive(asked, asked.num_shares)
    dtype: Any
    device: Any
    device, why_device = device_of(asked, run)
    dtype, reason = asked.dtype, "bf16 where the GPU has it, else fp32"
    if device == "cpu" or dtype != "auto":
        dtype, reason = choose_dtype(asked.dtype, threads)
    rows: list[Row] = [(f"--device {asked.device}", device, why_device)]
    rows += [(f"dtype {asked.dtype}", dtype, reason)]
    late = {
        f"--strategy {asked.strategy}": asked.is_planned_late, f"--stages {asked.stages}": asked.chooses_stages,
        "--experts.* auto": asked.chooses_experts,
    }  # fmt: skip
    if asked.dry_run and (what := next((what for what, is_late in late.items() if is_late), None)):
        rows.append((what, "chosen when all ranks have met", "they measure themselves and links"))
    elif not asked.is_planned_late and not asked.chooses_stages:
        rows += [batch_row(asked, batch, asked.num_shares), *pipeline_rows(run, batch)]
    rows += [rate_row(asked), *model_rows(asked), *capacity_rows(asked), *unused_rows(run), *late_rows(run)]
    rows += sparse_rows(run)
    resolved = run.with_island_size()
    if run.has_islands:
        size = resolved.config.local_size or 1
        why = "" if asked.local_size else "every worker of a single machine, else every machine, is an island"
        islands = f"{asked.world_size // size} island(s) of {size} rank(s)"
        rows.append((f"--local-size {asked.local_size or 'by default'}", islands, why))
    if asked.optimizer is None:
        rows.append(("--optimizer", f"{run.config.optimizer}", f"the choice of strategy {asked.strategy}"))
    loss, why_loss = loss_of(asked)
    rows.append((f"--loss {asked.loss}", loss, why_loss))
    if asked.compile:
        rows.append(("--compile", "layers are compiled one by one", "weights arrive before the forward, not during it"))
    return replace(resolved, config=replace(with_derived(resolved.config), dtype=dtype, device=device, loss=loss)), rows


def of_other_rank(config: TrainConfig) -> TrainConfig:
    """The configuration of a rank that does not check it.

    It makes the choices that need no measurement, as rank 0 does.
    """
    kept, _ = keep_chosen(config)
    return replace(kept, loss=loss_of(kept)[0])


def loss_of(config: TrainConfig) -> tuple[Any, str]:
    """The loss, "plain" or "cut", and the reason.

    Raises ConfigError for a model whose logits are not its head's output.
    """
    vocab_size: Any = load_tokenizer(config.tokenizer).vocab_size
    vocab_size = config.tables.get(model_table(config.model) or "", {}).get("vocab_size", vocab_size)
    if config.model.startswith("hf:"):
        vocab_size = check_hf(config.model.removeprefix("hf:"), 1, 1, {}).vocab_size
    if PIPELINE in tables_in_effect(config) and config.tables.get(PIPELINE, {}).get("head") == SPREAD:
        if config.loss == "cut":
            raise ConfigError(
                f"--loss cut with head {SPREAD!r}: each stage has its part of the logits, and keeps it for gradients; "
                "nearest: --loss auto, or head 'last'"
            )
        return "plain", f"each stage has its part of the logits: head {SPREAD!r}"
    loss, why = loss_in_effect(config.loss, derive(config, config.num_shares).micro_batch * config.seq_len, vocab_size)
    if loss == "cut" and config.model.startswith("hf:"):
        try:
            head_of(build_skeleton(config.model, 1, 1))
        except ConfigError as error:
            if config.loss == "cut":
                raise
            return "plain", f"{why}, but {error}"
    return loss, why


def plan(config: TrainConfig, problems: Problems) -> tuple[Run, Start]:
    """Check the run, fill in what follows, and state it in rows. Writes nothing.

    Raises ConfigError with all problems.
    """
    threads, why = threads_per_worker(max(1, config.workers))
    rows: list[Row] = [("threads per worker", str(threads), why)]
    with problems.collect():
        config, kept = keep_chosen(config)
        rows += kept
    with problems.collect():
        config, chosen = with_model(config, threads)
        rows += chosen
    run = check(config, problems)
    problems.raise_any()
    assert run is not None
    run, resolved = resolve(run, config, threads)
    rows += resolved
    rows += check_resume(run.config, RunDir(config.run_dir))
    rows += [fault_row(text, run) for text in config.inject]
    # "auto" is what the GPUs will say.
    dtype = None if run.config.dtype == "auto" else run.config.dtype
    return run, Start(dtype, threads, rows, config.stop_at, config.inject, config.allow_resume_drift)


def keep_chosen(config: TrainConfig) -> tuple[TrainConfig, list[Row]]:
    """The configuration of a resumed run, with the steps and the model that were chosen when the run began."""
    if not config.resume or (config.minutes is None and config.model != "auto" and not config.plans):
        return config, []
    before = None
    # One that is damaged is told of later.
    with suppress(CheckpointError):
        saved = latest(RunDir(config.run_dir).checkpoints)
        before = saved_config(saved) if saved else None
    if before is None:
        return config, []
    rows: list[Row] = []
    why = "chosen when the run began, and kept"
    if config.minutes is not None:
        rows.append((f"--minutes {config.minutes:g}", counted(before.steps, "step"), why))
        config = replace(config, steps=before.steps, minutes=None)
    if config.model == "auto":
        rows.append(("--model auto", before.model, why))
        config = replace(config, model=before.model)
    if config.plans:
        planned = f"--strategy {config.strategy}" if config.is_planned_late else f"--stages {config.stages}"
        found = before.strategy if config.is_planned_late else f"{before.stages or 1}"
        rows.append((planned, found, why))
        kept = ("strategy", "stages", "tensor", "order", "plan", "micro_batch", "tables")
        config = replace(config, **{name: getattr(before, name) for name in kept})
    return config, rows


def with_model(config: TrainConfig, threads: int) -> tuple[TrainConfig, list[Row]]:
    """The configuration with the model that `--model auto` chooses. Raises ConfigError if it can't choose one."""
    if config.model != "auto":
        return config, []
    dtype, _ = choose_dtype(config.dtype, threads)
    model, why = choose_model(config, threads, dtype, load_tokenizer(config.tokenizer).vocab_size)
    return replace(config, model=model), [("--model auto", model, why)]


def prepare(config: TrainConfig, problems: Problems) -> tuple[Run, Start]:
    """Plan the run, claim the run directory, and do once what every worker would do: tokens and kernels.

    Raises ConfigError with all problems at once.
    """
    run, start = plan(config, problems)
    config = run.config
    train, _ = tokens_of(config, load_tokenizer(config.tokenizer)).split(config.seq_len)
    num_sequences = count_sequences(train, config.seq_len)
    check_returns(run, num_sequences)
    check_norms(run, num_sequences)
    logging.getLogger("numba").setLevel(logging.WARNING)
    # What the ranks choose later packs like the stand-in, or as borders do.
    codecs = (*run.codecs, *(Pipeline().codecs if config.is_planned_late else ()))
    if run.residency is not None and run.residency.memory_bytes is not None:
        # What a compiler leaves in memory would count against the budget of a worker that prepares the run itself.
        apart(lambda: warm(codecs))
    warm(codecs)
    RunDir(config.run_dir).claim(config.node, to_toml(config), overwrite=config.overwrite)
    if run.residency is not None and run.residency.durable and not config.resume:
        # The steps of a run of the same name are of no use to this one.
        shutil.rmtree(run.residency.folder, ignore_errors=True)
    return run, start


def check_norms(run: Run, num_sequences: int) -> None:
    """Raise ConfigError if the disk can't hold the norms of all sequences that this run may see twice."""
    config, residency = run.config, run.residency
    taken = config.steps * (config.tokens_per_step or 0) // config.seq_len
    if residency is None or residency.sampled is None or (config.minutes is None and taken <= num_sequences):
        return
    skeleton = build_skeleton(
        config.model, load_tokenizer(config.tokenizer).vocab_size, config.seq_len,
        config.tables.get(model_table(config.model) or ""),
    )  # fmt: skip
    # Layers that share an input share their norms, so it may be less.
    linears = [each for layer in layers_of(skeleton) for each in layer.modules() if isinstance(each, nn.Linear)]
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", config.workers))
    own = -(-num_sequences // config.world_size)
    check_folder(residency.folder, num_here * 2 * config.seq_len * len(linears) * own)


def check_returns(run: Run, num_sequences: int) -> None:
    """Raise ConfigError for differences to a sequence's last message if no sequence comes twice."""
    config = run.config
    taken = config.steps * (config.tokens_per_step or 0) // config.seq_len
    if run.pipeline is not None and run.pipeline.delta and config.minutes is None and taken <= num_sequences:
        steps = num_sequences // max(1, taken // config.steps) + 1
        raise ConfigError(
            f"delta: no sequence returns in {config.steps} steps, which take {taken:,} of {num_sequences:,} sequences; "
            f"nearest: no delta, or --steps {steps}"
        )


def planned_rows(run: Run) -> list[Row]:
    """Rows that the ranks would add to the table, as far as they follow from the configuration."""
    config, shape = run.config, run.config.mesh_shape
    if config.is_planned_late or config.chooses_stages or config.chooses_experts:
        return []
    of_node = island_size(config) if run.has_islands else config.local_size or config.workers
    grid = Topology.stated(config.world_size, of_node)
    rows: list[Row] = [
        (f"strategy {config.strategy}", run.strategy.name, f"codecs: {', '.join(dict.fromkeys(map(str, run.codecs)))}"),
        ("mesh", str(shape), "axes from the outside in"),
        ("topology", str(grid), "stated" if config.local_size else "the workers of one machine share a node"),
    ]
    if run.chooses_attention:
        rows.append((f"--sequence.method {AUTO}", "chosen when all ranks have met", "they measure their links"))
    cuts = {name for name, size in shape.sizes.items() if size > 1} - {"data", "island"}
    if not cuts and name_of(config.optimizer or "") not in WHOLE:
        tokenizer, overrides = load_tokenizer(config.tokenizer), config.tables.get(model_table(config.model) or "")
        model = build_skeleton(config.model, tokenizer.vocab_size, config.seq_len, overrides)
        found = run.strategy.plan(model, grid, derive(config, config.num_shares).accumulation)
        plain = 8 * sum(param.numel() for param in model.parameters()) * (1 - 1 / config.world_size)
        rows.append(sent_row(sum(found.sent.values()), plain))
    return rows


def dry_run(config: TrainConfig, problems: Problems) -> int:
    """Print the start-up table and the resolved config.toml. Raises ConfigError with all problems at once."""
    run, start = plan(config, problems)
    rows = [*start.effects, *planned_rows(run)]
    Progress(config.steps, run.config.tokens_per_step or 0, 0.0).start_table(rows)
    print(f"\n{to_toml(run.config)}", end="")
    return 0


def saved_config(checkpoint: Path) -> TrainConfig | None:
    """The configuration of the run that saved a checkpoint; config.toml is that of the last start and may differ.

    None if the checkpoint does not state it, or if another version wrote it.
    """
    text, problems = Manifest.read(checkpoint).about.get("config"), Problems()
    config = parse_toml(text, str(checkpoint), problems) if text else None
    return None if problems.messages else config


def check_resume(config: TrainConfig, run_dir: RunDir) -> list[Row]:
    """Rows about what a resumed run changes. Raises ConfigError for a change that needs a new run."""
    if not config.resume:
        return []
    later = passed_over(run_dir.checkpoints)
    try:
        chosen, wrong = choose(run_dir.checkpoints)
    except CheckpointError as error:
        if config.nodes == 1:
            raise
        # The other machines wait for this one, whose workers tell them.
        return [("--resume", "no checkpoint is sound on this machine", str(error))]
    step = step_of(chosen)
    rows: list[Row] = [("a later checkpoint", "passed over", why) for why in later]
    rows += [("a later checkpoint", "passed over: it is damaged", problem) for problem in wrong]
    is_durable = bool(config.tables.get(RESIDENCY, {}).get("durable"))
    if is_durable:
        why = "the last step that all ranks have on their disks, if it is later than the checkpoint"
        rows.append(("--residency.durable", "goes on after the last step", why))
    if chosen is None:
        rows.append(("--resume", "starts at step 0", f"{run_dir.path} holds no checkpoint yet"))
        return rows[:-1] if is_durable else rows
    why = "all of its files have the right checksums"
    records = read_metrics(run_dir.metrics)
    if records and records[-1].step > step and not is_durable:
        why += f"; steps {step + 1} to {records[-1].step} are in no sound checkpoint, and are taken again"
    problems = Problems()
    if step > config.steps:
        problems.messages.append(f"--resume: step {step} is past --steps {config.steps}; nearest: --steps {step + 1}")
    if step == config.steps:
        why += f"; no step of --steps {step} is left: it measures and reports again, and trains nothing"
    rows.append(("--resume", f"goes on after step {step}", why))
    if config.stop_at is not None and config.stop_at < step:
        problems.messages.append(
            f"--stop-at {config.stop_at}: the checkpoint was taken after step {step}; nearest: {step}"
        )
    if not run_dir.config(config.node).is_file():
        problems.raise_any()
        return rows
    old = read_toml(run_dir.config(config.node), problems)
    for name in FIXED_ON_RESUME:
        before, after = getattr(old, name), getattr(config, name)
        if before != after:
            problems.messages.append(f"--resume: {name} was {before} and can't become {after}; start a new run for it")
    saved = saved_config(chosen) or old
    # A checkpoint knows nothing of how the model was cut, and where it lay.
    for table in (tables_in_effect(config) & tables_in_effect(saved)) - LAYOUT_TABLES.keys():
        if saved.tables.get(table, {}) != config.tables.get(table, {}):
            problems.messages.append(f"--resume: the options [{table}] can't change; start a new run for that")
    problems.raise_any()
    return [*rows, *resume_rows(old, config)]
