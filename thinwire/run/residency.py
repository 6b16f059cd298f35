"""Decides which parts of a run lie in memory and which on a disk, once its model and batch are known."""

from __future__ import annotations

from torch import nn

from thinwire.collectives import Topology
from thinwire.hosts.offload.activations import kept_ways
from thinwire.hosts.offload.tiling import tiled_shapes
from thinwire.methods.memory import Floor, Residency, resident_method, settled
from thinwire.models.llama import Llama
from thinwire.optim import JOINT, NAMED
from thinwire.run.config import derive
from thinwire.run.optimizer import limits_itself, name_of
from thinwire.run.run import Run


def resolved(run: Run, skeleton: nn.Module) -> tuple[Residency, Floor]:
    """The residency with every "auto" decided, and the least memory that a rank needs. skeleton: the model on meta.

    If the forward's activations do not fit beside that, layers are recomputed in backward.
    """
    config, residency = run.config, run.residency
    assert residency is not None
    batch = derive(config, config.num_shares)
    topology = Topology.stated(config.world_size, config.local_size or config.workers)
    shapes = tiled_shapes(skeleton, residency.tile)
    place = resident_method(run.strategy), shapes, topology, batch.accumulation
    kept = None
    # Of other models nobody knows what a forward does besides computing, and compiled layers are as they are.
    if residency.memory_bytes and type(skeleton) is Llama and not config.compile:
        given = config.loss, batch.micro_batch, config.seq_len, config.dtype, residency.slices or 1, residency.tile
        kept = kept_ways(skeleton.config, *given)
    across = name_of(config.optimizer or "") in (*NAMED, *JOINT)
    at_once = across and not config.grad_clip and limits_itself(config.optimizer or "")
    residency = settled(residency, *place, kept, across=across, at_once=at_once)
    return residency, Floor.of(residency, *place, kept)
