"""The start-up table of a sharded optimizer: what was asked for, what is in effect, why they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thinwire.collectives import Communicator
from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit
from thinwire.hosts.sharded.memory import Memory
from thinwire.hosts.sums import JoinedSums
from thinwire.methods.sharded import ShardedMethod
from thinwire.table import Row


def rows_on_messages(
    method: ShardedMethod, comm: Communicator, units: Sequence[LiveUnit], memory: Memory, sums: JoinedSums | None
) -> Iterator[Row]:
    """Rows on what ranks send each other, and on what they keep for it. comm: the main group."""
    buckets = [bucket for unit in units for bucket in unit.buckets]
    yield f"strategy {method.name}", method.name, ""
    yield "topology", str(comm.topology), comm.topology_reason
    if comm.topology.world_size == 1:
        yield "compression", "none", "a single rank sends nothing: weights and gradients stay exact"
        return
    yield from method.describe(buckets[0].layout.levels, [unit.unit for unit in units])
    if held := memory.planned_bytes:
        own, fresh = memory.own[0], max(bucket.layout.wire.fresh for bucket in buckets)
        effect = str(own) if own is not None else "differences from estimates" if fresh else "on"
        yield "error feedback", effect, f"{held / 1e6:.3f} MB on this rank"
    if sums is not None:
        yield from sums.rows()
    device = buckets[0].live.device
    kernels = {codec.backend(device) for bucket in buckets for codec in bucket.layout.wire.codecs}
    yield "codec kernels", ", ".join(sorted(kernels)), f"on {device}"
    padded, true = (sum(each) for each in zip(*map(_sizes, buckets), strict=True))
    yield "flat tensors", f"{len(buckets)}, {true:,} parameters", f"{padded / max(true, 1) - 1:.2%} padding"


def _sizes(bucket: FlatBucket) -> tuple[int, int]:
    """Elements of a bucket, with padding and without."""
    return bucket.layout.numel, sum(slot.span.numel for slot in bucket.slots)
