"""The parts of a strategy's training that would lie on a disk, and the bytes that a step would move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from thinwire.calibration.process import process_memory
from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.hosts.offload.counted import kept_of, vocabulary_of
from thinwire.hosts.offload.tiling import tiled_shapes
from thinwire.hosts.sums import across_of
from thinwire.layout.mesh import MeshShape
from thinwire.losses import loss_in_effect
from thinwire.methods.interface import Method
from thinwire.methods.memory import (
    Floor,
    MemoryPart,
    Setup,
    check_across,
    check_outer,
    in_use,
    outer_bytes,
    placed,
    resident_method,
    settled,
)
from thinwire.methods.outer.base import IslandsMethod
from thinwire.options import RESIDENCY
from thinwire.planner.optimizers import counted_by
from thinwire.planner.options import ExplainConfig
from thinwire.planner.waiting import rates_of, rows_on_waiting
from thinwire.report.units import bytes_text, seconds_text
from thinwire.run.config import TrainConfig
from thinwire.run.optimizer import name_of, optimizer_over
from thinwire.run.places import (
    FLAT,
    NO_STORE,
    check_no_store,
    check_slices,
    completed,
    made_residency,
    residency_options,
)
from thinwire.run.residency import why_whole
from thinwire.table import Row

# The strategy whose parts are placed where none is stated.
PLACED = "sdp4bit"


@dataclass(frozen=True)
class Resident:
    """Where the parts of a rank's training lie under a budget, and rows of (asked for, in effect, why)."""

    parts: list[MemoryPart]
    rows: list[Row]


def stated_options(config: ExplainConfig) -> dict[str, Any]:
    """The stated options of a residency. Raises ConfigError for what `thinwire train` refuses of them."""
    flags, own = {name: getattr(config, name) for name in FLAT}, config.tables.get(RESIDENCY, {}).get("disk_rate")
    options = residency_options(TrainConfig(**flags, tables=config.tables))
    if config.disk_rate is not None:
        if own not in (None, config.disk_rate):
            raise ConfigError(f"--disk-rate {config.disk_rate} and --{RESIDENCY}.disk-rate {own}: give one of them")
        options["disk_rate"] = config.disk_rate
    if options:
        check_slices(made_residency(completed(options), config.tables), config.micro_batch)
    return options


def where_all_lies(
    config: ExplainConfig, options: Mapping[str, Any], names: Sequence[str],
    strategy_of: Callable[[str, ExplainConfig], Method], model: nn.Module,
) -> Resident:  # fmt: skip
    """The parts of the one stated strategy. Raises ConfigError for several, and for a budget that is too small.

    options: the stated ones.
    """
    residency = made_residency(completed(options), config.tables)
    if options.get("store") == NO_STORE:
        check_no_store(residency, completed(options))
    if len(names) != 1:
        raise ConfigError(f"--memory: name one strategy whose parts are to be placed; nearest: --strategy {PLACED}")
    method = strategy_of(names[0], config)
    shape = MeshShape({}) if config.mesh is None else MeshShape.parse(config.mesh)
    optimizer = counted_by(method, config.optimizer)
    inner = optimizer_over(optimizer, model, lr=0.0, weight_decay=0.0, seed=0)
    given, whole = (config.loss, config.micro_batch, config.seq_len), why_whole(config.model, model)
    cuts = {"pipeline": config.stages, "tensor": config.tensor}
    axes = {name for name, size in shape.sizes.items() if size > 1} | {name for name, at in cuts.items() if at}
    shapes = tiled_shapes(model, residency.tile)
    check_outer(residency, method)
    # An island is a node.
    topology = Topology(1 if isinstance(method, IslandsMethod) else config.nodes, config.local_size)
    setup = Setup(
        resident_method(method, axes), shapes, topology, config.micro_batches or 1,
        kept_of(model, *given, slices=residency.slices or 1, tile=residency.tile, sampled=residency.sampled),
        across_of(inner, model),
        outer=outer_bytes(method, model, topology), is_built_whole=bool(whole), process=process_memory(),
    )  # fmt: skip
    if setup.across is not None and residency.optimizer != "memory":
        check_across(residency, name_of(optimizer), streams=setup.across.optimizer.streams)
    kept, rows = setup.kept, list[Row]()
    if kept is None:
        rows.append(("activations", "not counted", "of such a model nobody knows them without a step of it"))
    elif (words := vocabulary_of(model)) is not None:
        loss, why = loss_in_effect(config.loss, config.micro_batch * config.seq_len, words)
        rows.append((f"--loss {config.loss}", loss, why))
    rates = rates_of(config, residency)
    asked, residency = residency, settled(residency, setup, rates)
    if whole and (residency.weights == "disk" or setup.is_cut):
        rows.append(("weights", "the whole model on every rank, at first", whole))
    if residency.is_sliced:
        rows.append(
            (f"--slices {residency.slices}", f"{residency.slices} parts in each layer", "weights are read once for all")
        )
    if residency.recomputes and kept is not None:
        what = "from inputs on the disk" if residency.spills else "from inputs in memory"
        rows.append(
            ("activations", f"layers are computed again, {what}", f"whole they would take {bytes_text(kept['keep'])}")
        )
    Floor.of(residency, setup).check(residency.memory_bytes)
    parts = list(placed(residency, setup))
    moved = sum(part.read + part.written for part in parts)
    rows.append((f"--memory {config.memory}", f"{bytes_text(moved)} to and from the disk in a step", "of each rank"))
    held, used = sum(part.memory for part in parts), in_use(parts, setup)
    why = "the budget counts what a process reserves, too, such as stacks of threads"
    rows.append(("memory in use", f"{bytes_text(used)} of {bytes_text(held)}", why))
    if residency.rate is not None:
        seconds = seconds_text(moved / residency.rate)
        rows.append((f"--disk-rate {config.disk_rate}", f"{seconds} of the disk in a step", "computing may hide it"))
    rows += rows_on_waiting(config, asked, residency, setup, rates)
    return Resident(parts, rows)
