"""Whether a budget of memory holds what a run keeps there."""

from __future__ import annotations

import os

from torch import nn

from thinwire.collectives.topology import Topology
from thinwire.device import machine_bytes
from thinwire.errors import ConfigError, Problems, counted
from thinwire.hosts.offload.residence import check_model
from thinwire.hosts.offload.tiling import tiled_shapes
from thinwire.launch.check_parts import device_of, loss_of
from thinwire.losses import head_of
from thinwire.methods.memory import Floor, Residency, check_at_once, check_outer, resident_method
from thinwire.models.llama import Llama
from thinwire.models.moe import check_parts
from thinwire.report.units import bytes_text
from thinwire.run.config import TrainConfig, derive
from thinwire.run.optimizer import limits_itself, name_of
from thinwire.run.places import check_slices
from thinwire.run.residency import check_optimizer, check_tiled, resolved
from thinwire.run.run import Run
from thinwire.run.run_dir import RunDir
from thinwire.tiers import check_folder


def check_residency(config: TrainConfig, run: Run, model: nn.Module) -> None:
    """Raise ConfigError, with all reasons, for what can't lie on a disk, and for a budget or disk that is too small."""
    residency, problems, optimizer = run.residency, Problems(), run.config.optimizer or ""
    if residency is None:
        return
    axes = {name for name, size in config.mesh_shape.sizes.items() if size > 1}
    resident_method(run.strategy, axes, residency)
    problems.note(check_outer, residency, run.strategy)
    problems.note(check_optimizer, residency, optimizer)
    with problems.collect():
        check_tile(config, run, residency, model)
    with problems.collect():
        check_at_once(residency, name_of(optimizer), limits=limits_itself(optimizer), max_norm=config.grad_clip)
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
        problems.note(check_sliced, config, residency)
    else:
        problems.note(check_slices, residency, micro_batch)
    if residency.is_sliced:
        problems.note(check_parts, model)
    problems.note(check_model, residency, model)
    problems.note(floor.check, residency.memory_bytes)
    if floor.disk:
        problems.note(
            check_folder, residency.folder, num_ranks_here(config) * floor.disk - own_bytes(config, residency)
        )
    problems.raise_any()


def check_machine(config: TrainConfig, run: Run, model: nn.Module) -> None:
    """Raise ConfigError if the weights and gradients of this machine's ranks can't be in its memory at once.

    What optimizers and activations take is not counted, so a run that passes may still run out of memory.
    """
    is_cut = any(size > 1 for name, size in config.mesh_shape.sizes.items() if name not in ("data", "island"))
    if run.residency is not None or is_cut or device_of(config, run)[0] != "cpu":
        return
    grid = Topology.stated(config.world_size, config.local_size or config.workers)
    plan = run.strategy.plan(model, grid, derive(config, config.num_shares).accumulation)
    num_here, held, room = num_ranks_here(config), plan.weights + plan.gradients, machine_bytes()
    if num_here * held > room:
        fitting = int(room // held)
        nearest = f"--workers {fitting}" if fitting else "a smaller --model, or --memory with a --store"
        raise ConfigError(
            f"--workers {config.workers}: weights and gradients of {config.model} take {bytes_text(held)} in each of "
            f"{counted(num_here, 'rank')} here, and this machine has {bytes_text(room)}; nearest: {nearest}"
        )


def num_ranks_here(config: TrainConfig) -> int:
    """Ranks on this machine, also of those that torchrun starts."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", config.workers))


def own_bytes(config: TrainConfig, residency: Residency) -> int:
    """Bytes of files that this run finds on the disk and uses again, or deletes before it starts."""
    folder = residency.folder
    is_deleted = config.overwrite and folder.absolute() == RunDir(config.run_dir).store.absolute()
    if not (residency.durable or is_deleted):
        return 0
    return sum(512 * path.lstat().st_blocks for path in folder.rglob("*") if path.is_file())


def check_late_residency(config: TrainConfig, run: Run) -> None:
    """Raise ConfigError, with all reasons, for what no way to train can have on a disk that the ranks may choose."""
    residency, problems, optimizer = run.residency, Problems(), run.config.optimizer or ""
    if residency is None:
        return
    problems.note(check_sliced, config, residency)
    with problems.collect():
        check_at_once(residency, name_of(optimizer), limits=limits_itself(optimizer), max_norm=config.grad_clip)
    if residency.needs_store:
        # How much lies there is known when the ranks have chosen.
        problems.note(check_folder, residency.folder, 0)
    problems.raise_any()


def check_sliced(config: TrainConfig, residency: Residency) -> None:
    """Raise ConfigError for slices of a batch whose documents are kept apart."""
    if residency.is_sliced and config.documents:
        raise ConfigError(
            "--slices with --documents: the bounds of documents are those of a whole batch; leave one of both out"
        )


def check_tile(config: TrainConfig, run: Run, residency: Residency, model: nn.Module) -> None:
    """Raise ConfigError for tiles that there can't be. model: only its shapes are used."""
    if residency.tile is None:
        return
    topology = Topology.stated(config.world_size, config.local_size or config.workers)
    check_tiled(residency, run.config.optimizer or "", resident_method(run.strategy), topology)
    shapes = tiled_shapes(model, residency.tile)
    if loss_of(config)[0] == "cut":
        head = model.lm_head if isinstance(model, Llama) else head_of(model)
        name = next(name for name, module in model.named_modules() if module is head)
        # Raises if the logits of a tile are none.
        getattr(shapes.get_submodule(name), "strips", None)
