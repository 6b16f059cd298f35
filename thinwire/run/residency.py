"""Decides which parts of a run lie in memory and which on a disk, once its model and batch are known."""

from __future__ import annotations

from torch import nn

from thinwire.calibration.process import process_memory
from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.hosts.offload.counted import kept_of
from thinwire.hosts.offload.tiling import tiled_shapes
from thinwire.hosts.sums import across_of
from thinwire.methods.memory import Residency, Setup, check_across, outer_bytes, resident_method, settled
from thinwire.methods.sharded import ShardedMethod
from thinwire.models.hf import why_whole_hf
from thinwire.models.moe import MoELlama
from thinwire.optim import JOINT, NAMED, WHOLE
from thinwire.run.config import derive
from thinwire.run.optimizer import limits_itself, name_of, optimizer_over
from thinwire.run.run import Run, island_size


def resolved(run: Run, skeleton: nn.Module) -> tuple[Residency, Setup]:
    """The residency with every "auto" decided, and what a rank trains. skeleton: the model on meta.

    If the forward's activations do not fit beside that, layers are recomputed in backward.
    """
    assert run.residency is not None
    setup = setup_of(run, skeleton)
    return settled(run.residency, setup), setup


def setup_of(run: Run, skeleton: nn.Module) -> Setup:
    """What a rank of this run trains. skeleton: the model on meta."""
    config, residency, optimizer = run.config, run.residency, run.config.optimizer or ""
    assert residency is not None
    batch = derive(config, config.num_shares)
    kept = None
    # Compiled layers are as they are.
    if residency.memory_bytes and not config.compile:
        given = config.loss, batch.micro_batch, config.seq_len, config.dtype
        kept = kept_of(skeleton, *given, residency.slices or 1, residency.tile, residency.sampled)
    name = name_of(optimizer)
    inner = optimizer_over(optimizer, skeleton, lr=0.0, weight_decay=0.0, seed=0) if name in WHOLE else None
    topology = Topology.stated(config.world_size, config.local_size or config.workers)
    topology = Topology(1, island_size(config)) if run.has_islands else topology
    return Setup(
        resident_method(run.strategy), tiled_shapes(skeleton, residency.tile), topology, batch.accumulation, kept,
        None if inner is None else across_of(inner, skeleton),
        outer=outer_bytes(run.strategy, skeleton, topology),
        at_once=name in NAMED and not config.grad_clip and limits_itself(optimizer),
        is_built_whole=bool(why_whole(config.model, skeleton)), process=process_memory(),
    )  # fmt: skip


def why_whole(model: str, skeleton: nn.Module) -> str:
    """Why every rank builds the whole of a model at first, although its weights lie elsewhere; empty: it does not."""
    if isinstance(skeleton, MoELlama):
        return "a mixture counts rows from the start"
    if not model.startswith("hf:"):
        return ""
    names = (name.removeprefix("model.") for name, _ in skeleton.named_parameters())
    return why_whole_hf(model.removeprefix("hf:"), names)


def check_optimizer(residency: Residency, optimizer: str) -> None:
    """Raise ConfigError, with all reasons, for an optimizer whose state can't lie on a disk so.

    optimizer: `NAME`, or `NAME[option=value,...]`.
    """
    name = name_of(optimizer)
    if residency.optimizer == "memory":
        return
    if name in (*NAMED, *JOINT):
        check_across(residency, name, streams=True)
    elif name in WHOLE:
        raise ConfigError(f"residency: {name} looks across matrices, and from a disk it gets pieces; nearest: adamw")


def check_tiled(residency: Residency, optimizer: str, method: ShardedMethod, topology: Topology) -> None:
    """Raise ConfigError for tiles beside an optimizer or a method that takes matrices whole; `optimizer` as above."""
    name = name_of(optimizer)
    if residency.tile is None:
        return
    if name in (*NAMED, *JOINT, *WHOLE):
        raise ConfigError(f"tile: {name} looks across matrices, and a tile would be one to it; nearest: adamw")
    if method.levels(topology).weights_over > 1:
        raise ConfigError(f"tile: {method.name} gathers weights by layers, whole; nearest: --strategy sdp4bit")
