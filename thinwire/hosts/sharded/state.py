"""Saves a sharded optimizer, and loads what any layout saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.checkpoint import Piece, Snapshot, Source
from thinwire.collectives import Communicator
from thinwire.hosts.sharded.bucket import FlatBucket
from thinwire.hosts.sharded.owned import States
from thinwire.hosts.sharded.weights import Weights
from thinwire.layout.formats import LevelFormat
from thinwire.methods.sharded import ShardedMethod
from thinwire.state.memory import State
from thinwire.state.portable import REPLICA
from thinwire.state.replicas import short_digest

if TYPE_CHECKING:
    from thinwire.hosts.offload.tiling import TileMap

MEMORY = "gradient memory"
LEFT = "moving averages over few steps, of these pieces alone, and no sums"


def replicas(bucket: FlatBucket, shard: Tensor) -> dict[str, Piece]:
    """The pieces of a tensor of the shape of this rank's shard, as compute weights.

    Empty if the masters are used to compute.
    """
    slots = [slot for slot in bucket.slots if slot.owned.start < slot.owned.stop]
    return {f"{REPLICA}/{slot.name}": slot.piece(shard) for slot in slots} if bucket.layout.has_replica else {}


class ShardedState:
    """Masters, compute weights, error feedback and the user's optimizer of one rank."""

    def __init__(
        self,
        method: ShardedMethod,
        states: States,
        weights: Weights,
        comm: Communicator,
        buckets: Sequence[FlatBucket],
        memory: State,
        tiling: TileMap | None = None,
    ) -> None:
        self.tiling = tiling
        self.method, self.states, self.weights = method, states, weights
        self.comm, self.buckets, self.memory = comm, buckets, memory

    def snapshot(self, numbers: Mapping[str, Any]) -> Snapshot:
        """All state in pieces that any layout can load: views of the live tensors."""
        return self._as_whole(self.states.add_to(self._without_states(numbers)))

    def without_states(self, numbers: Mapping[str, Any]) -> Snapshot:
        """The same without masters and the optimizer's state."""
        return self._as_whole(self._without_states(numbers))

    def _as_whole(self, snapshot: Snapshot) -> Snapshot:
        return snapshot if self.tiling is None else self.tiling.as_whole(snapshot)

    def _without_states(self, numbers: Mapping[str, Any]) -> Snapshot:
        own, common = {MEMORY: self.memory.state_dict()}, {**numbers, "lossy_weights": self.is_lossy}
        shares = [share.below(MEMORY) for share in self.memory.shares()]
        snapshot = Snapshot(self.layout(), own=own, common=common, shares=shares, left={MEMORY: LEFT})
        for bucket in self.buckets:
            if bucket.layout.has_replica:
                snapshot.pieces |= replicas(bucket, self.weights.own(bucket))
        return snapshot

    @torch.no_grad()
    def go_on(self, source: Source) -> None:
        """Continue from what `without_states` saved on the same layout; masters and states are there. A collective."""
        if self.tiling is not None:
            self.tiling.read_from(source)
        self._restore_weights(source)
        self.memory.load_state_dict(source.own(MEMORY))

    @torch.no_grad()
    def restore(self, source: Source) -> None:
        """Continue from a checkpoint of any layout; from the same layout, bit for bit. A collective."""
        if self.tiling is not None:
            self.tiling.read_from(source)
        is_same = source.fits(self.layout())
        self.states.restore(source)
        self._restore_weights(source)
        if is_same:
            self.memory.load_state_dict(source.own(MEMORY))
            return
        source.is_exact = source.is_exact and not (self.is_lossy or source.common["lossy_weights"])
        self.memory.take_over(source.mean_of)

    def _restore_weights(self, source: Source) -> None:
        """Load the compute weights, or take them from the masters, then send them to all ranks."""
        has_replica = any(bucket.layout.has_replica for bucket in self.buckets)
        if has_replica and not source.has_any(REPLICA):
            source.note("replicas that weight differences refer to", "transformed", "rebuilt from the weights")
        elif source.has_any(REPLICA) and not has_replica:
            source.drop_replica("weights travel whole and exactly here")
        for bucket in self.buckets:
            shard = bucket.masters.to(bucket.layout.dtype, copy=True)
            source.read({key: piece for key, piece in replicas(bucket, shard).items() if source.has(key)})
            with self.weights.held(bucket):
                bucket.spread(shard)

    @property
    def is_lossy(self) -> bool:
        """Whether compute weights differ from the weights that are saved."""
        wires = [b.layout.wire for b in self.buckets if b.layout.levels.weights_over > 1]
        return any(isinstance(wire, LevelFormat) and not wire.shards.traits.lossless for wire in wires)

    def layout(self) -> dict[str, Any]:
        """See `layout_of`."""
        return layout_of(self.method, self.comm, self.buckets)


def layout_of(method: ShardedMethod, comm: Communicator, buckets: Sequence[FlatBucket]) -> dict[str, Any]:
    """The properties that must be equal for a state to be loaded as it is."""
    levels = buckets[0].layout.levels
    slots = [slot for bucket in buckets for slot in bucket.slots]
    shapes = [(slot.name, tuple(slot.span.shape), str(slot.param.dtype)) for slot in slots]
    return {
        "rank": comm.rank,
        "world_size": comm.world_size,
        "local_size": comm.topology.local_size,
        "strategy": repr((method.matrix(), method.vector())),
        "gradient memory": str(method.gradient_memory([])),
        "levels": [levels.weights_over, levels.gradients_over],
        "parameters": short_digest(shapes),
        "bucket_numels": [bucket.layout.numel for bucket in buckets],
    }
