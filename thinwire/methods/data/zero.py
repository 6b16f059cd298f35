"""ZeRO-1/2 in fp32 and in bf16, and what all methods on the sharded host share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import nn

from thinwire.codecs import (
    Cast,
    Codec,
    Identity,
)
from thinwire.collectives import Topology
from thinwire.layout.buckets import Bucket, Seat, build_buckets
from thinwire.layout.formats import Strategy, WireFormat
from thinwire.methods.interface import CUTS_TENSORS, Plan, agreement_sent, trained_shapes
from thinwire.optim import ELEMENTWISE


class ShardedMethod:
    """What makes a choice of codecs a Method: it is applied by `thinwire.zero`."""

    settled_after: ClassVar[int] = 0
    optimizers: ClassVar[tuple[str, ...]] = ELEMENTWISE
    optimizers_reason: ClassVar[str] = CUTS_TENSORS

    @property
    def codecs(self: Strategy) -> tuple[Codec, ...]:
        """Whose kernels are compiled before the workers start."""
        return (*self.matrix().codecs, *self.vector().codecs)

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> Plan:
        """Weights and gradients are whole; only the last micro-batch's backward communicates."""
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        seat = cast(Any, Seat(topology))
        buckets = build_buckets(named, cast(Strategy, self), lambda name, param: seat, None, Bucket)
        sent = agreement_sent(topology, len(named))
        for bucket in buckets:
            for key, num_bytes in bucket.sent_bytes().items():
                sent[key] = sent.get(key, 0) + num_bytes
        shard = sum(4 * bucket.shard_numel for bucket in buckets)
        lost = sum(4 * bucket.lost_numel for bucket in buckets)
        return Plan(
            weights=sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets),
            gradients=sum(4 * shape.numel() for shape in trained_shapes(model).values()) + shard,
            optimizer=3 * shard,
            sent=sent,
            other={"error feedback": lost} if lost else {},
        )


@dataclass(frozen=True)
class Zero(ShardedMethod):
    """Sharded optimizer with fp32 both ways: the exact reference; 8 (P-1)/P bytes per parameter and step."""

    name: ClassVar[str] = "zero"

    def matrix(self) -> WireFormat:
        return WireFormat(Identity(), differences=False, intra=Identity(), inter=Identity())

    vector = matrix


@dataclass(frozen=True)
class ZeroBF16(ShardedMethod):
    """Weights and gradients travel as bf16, masters and sums stay fp32; 4 (P-1)/P bytes per parameter and step."""

    name: ClassVar[str] = "zero-bf16"

    def matrix(self) -> WireFormat:
        return WireFormat(Cast("bf16"), differences=False, intra=Cast("bf16"), inter=Cast("bf16"))

    vector = matrix
