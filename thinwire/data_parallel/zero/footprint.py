"""What a rank holds and sends under `thinwire.zero`."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from thinwire.collectives import Topology
from thinwire.data_parallel.interface import Footprint, agreement_sent, footprint, trained_shapes
from thinwire.data_parallel.strategies import OnZero, Strategy
from thinwire.data_parallel.zero.layout import Bucket, Seat, build_buckets

# The sum of squares and the loss in fp64, and the flags; a bit for each parameter comes on top.
WORD_BYTES = 17


@footprint.register
def zero_footprint(strategy: OnZero, model: nn.Module, topology: Topology, micro_batches: int) -> Footprint:
    """Weights and gradients are whole; only the last micro-batch's backward communicates."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    seat = cast(Any, Seat(topology))
    buckets = build_buckets(named, cast(Strategy, strategy), lambda name, param: seat, None, Bucket)
    sent = agreement_sent(topology, WORD_BYTES + -(-len(named) // 8))
    for bucket in buckets:
        for key, num_bytes in bucket.sent_bytes().items():
            sent[key] = sent.get(key, 0) + num_bytes
    shard = sum(4 * bucket.shard_numel for bucket in buckets)
    lost = sum(4 * bucket.lost_numel for bucket in buckets)
    return Footprint(
        weights=sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets),
        gradients=sum(4 * shape.numel() for shape in trained_shapes(model).values()) + shard,
        optimizer=3 * shard,
        sent=sent,
        other={"error feedback": lost} if lost else {},
    )
