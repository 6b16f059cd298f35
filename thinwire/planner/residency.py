"""The parts of a strategy's training that would lie on a disk, and the bytes that a step would move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.hosts.offload.activations import kept_ways
from thinwire.hosts.offload.tiling import tiled_shapes
from thinwire.layout.mesh import MeshShape
from thinwire.losses import loss_in_effect
from thinwire.methods.interface import Method
from thinwire.methods.memory import Floor, MemoryPart, Residency, efficiency, placed, resident_method, settled
from thinwire.models.llama import Llama
from thinwire.options import RESIDENCY, made
from thinwire.planner.options import ExplainConfig
from thinwire.report.units import bytes_text, seconds_text


@dataclass(frozen=True)
class Resident:
    """Where the parts of a rank's training lie under a budget, and rows of (asked for, in effect, why)."""

    parts: list[MemoryPart]
    rows: list[tuple[str, str, str]]


def where_all_lies(
    config: ExplainConfig, names: Sequence[str], strategy_of: Callable[[str, ExplainConfig], Method], model: nn.Module
) -> Resident:
    """The parts of the one stated strategy. Raises ConfigError for several, and for a budget that is too small."""
    flags: dict[str, Any] = {"memory": config.memory, "disk_rate": config.disk_rate}
    flags |= {"activations": config.activations, "slices": config.slices}
    stated = {name: value for name, value in flags.items() if value is not None}
    residency = made(Residency, {**config.tables.get(RESIDENCY, {}), **stated})
    if len(names) != 1:
        raise ConfigError("--memory: name one strategy whose parts are to be placed; nearest: --strategy sdp4bit")
    method = strategy_of(names[0], config)
    shape = MeshShape({}) if config.mesh is None else MeshShape.parse(config.mesh)
    cuts = {"pipeline": config.stages, "tensor": config.tensor}
    axes = {name for name, size in shape.sizes.items() if size > 1} | {name for name, at in cuts.items() if at}
    shapes = tiled_shapes(model, residency.tile)
    place = resident_method(method, axes), shapes, Topology(config.nodes, config.local_size), config.micro_batches or 1
    kept: dict[str, int] | None = None
    rows: list[tuple[str, str, str]] = []
    if type(model) is Llama:
        loss, why = loss_in_effect(config.loss, config.micro_batch * config.seq_len, model.config.vocab_size)
        rows.append((f"--loss {config.loss}", loss, why))
        given = config.loss, config.micro_batch, config.seq_len
        kept = kept_ways(model.config, *given, slices=residency.slices or 1, tile=residency.tile)
    else:
        rows.append(("activations", "not counted", "they are known of presets such as demo alone"))
    residency = settled(residency, *place, kept)
    if residency.is_sliced:
        slices = min(residency.slices or 1, config.micro_batch)
        rows.append((f"--slices {residency.slices}", f"{slices} parts in each layer", "weights are read once for all"))
    if residency.recomputes and kept is not None:
        what = "from inputs on the disk" if residency.spills else "from inputs in memory"
        rows.append(
            ("activations", f"layers are computed again, {what}", f"whole they would take {bytes_text(kept['keep'])}")
        )
    Floor.of(residency, *place, kept).check(residency.memory_bytes)
    parts = list(placed(residency, *place, kept))
    moved = sum(part.read + part.written for part in parts)
    rows.append((f"--memory {config.memory}", f"{bytes_text(moved)} to and from the disk in a step", "of each rank"))
    if residency.rate is not None:
        seconds = seconds_text(moved / residency.rate)
        rows.append((f"--disk-rate {config.disk_rate}", f"{seconds} of the disk in a step", "computing may hide it"))
        if config.gflops is not None and residency.weights == "disk":
            share = efficiency(config.micro_batch * config.seq_len, residency.rate, config.gflops * 1e9)
            rows.append(
                ("efficiency", f"{share:.2f}", "of computing that waits for all weights, without reading ahead")
            )
    return Resident(parts, rows)
