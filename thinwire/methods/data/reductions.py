"""How the gradients of one bucket become their mean over the ranks, as communication jobs; what all ways share."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.checkpoint import Debt
from thinwire.codecs import Codec, Identity, derive_seed
from thinwire.collectives import Topology
from thinwire.collectives.feedback import Lost
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import all_reduce
from thinwire.collectives.rounds import Rounds
from thinwire.layout.slices import Slices
from thinwire.state.clipping import Clip
from thinwire.state.portable import Owed

FP32 = Identity()
FP32_BYTES, BF16_BYTES = 4, 2
OPERATION = "gradients"
BY_FORMULA = ("bytes sent", "by formula: 2 (P-1)/P of what is reduced", "torch's collectives are not metered")


@dataclass(frozen=True)
class Bucket:
    """What a GradBucket says, for use after DDP's hook has returned.

    names: of the parameters; grads: their gradients, views into `flat`, fp32.
    """

    number: int
    names: list[str]
    flat: Tensor
    grads: list[Tensor]
    last: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.grads

    def is_last(self) -> bool:
        return self.last


@dataclass(frozen=True)
class Step:
    """Which step a bucket belongs to. lrs: learning rates by parameter name, empty where no optimizer is known."""

    number: int
    lrs: Mapping[str, float]


@dataclass(frozen=True)
class AllReduce:
    """A sum over all ranks, in place and by gloo, that the communication thread can wait for."""

    link: Link
    tensor: Tensor
    work: dist.Work

    @classmethod
    def start(cls, link: Link, tensor: Tensor) -> AllReduce:
        work = dist.all_reduce(tensor, group=link.wire.group, async_op=True)
        assert work is not None
        return cls(link, tensor, work)

    def wait(self) -> None:
        with self.link.timed("wait_s", OPERATION):
            self.work.wait(timedelta(seconds=self.link.wire.timeout_s))
        count_ring(self.link, self.tensor.nbytes)


def ring_bytes(num_bytes: int, grid: Topology) -> dict[str, int]:
    """What one rank sends on each level for a ring all_reduce: P-1 of P parts to sum, then again to spread.

    All of it counts as between nodes where there are several, as it is for the ranks at a node's ends.
    """
    sent = 2 * (grid.world_size - 1) * num_bytes // grid.world_size
    return {"intra": 0, "inter": sent} if grid.num_nodes > 1 else {"intra": sent, "inter": 0}


def count_ring(link: Link, num_bytes: int) -> None:
    """Enter an all_reduce by gloo, which nobody meters, by its formula."""
    for level, sent in ring_bytes(num_bytes, link.topology).items():
        if sent:
            link.wire.meter.count(OPERATION, level, sent, sent)


class Reduction(Protocol):
    """A way to average buckets, with what it remembers between steps, by parameter name: buckets may change."""

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        """Overwrite the bucket with the mean over ranks, the same bits on all of them; a communication job."""
        ...

    def sent_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> dict[str, int]:
        """Payload of a rank in a step for gradients of these shapes, by level, once the method is under way."""
        ...

    def kept_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> dict[str, int]:
        """Memory of a rank for what is remembered between steps, by what it is called."""
        ...

    def rows(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, str, str]]:
        """Rows of (asked for, in effect, why)."""
        ...

    def forget(self) -> list[str]:
        """A step was skipped: drop what has met values that are not finite; the names of those parameters."""
        ...

    def residuals(self) -> dict[str, Tensor]:
        """By parameter, what this rank was given and has not passed on, in units of a rank's gradient.

        Sum over steps of what came out + mean over ranks of this = sum over steps of the mean that was put in.
        """
        ...

    def debts(self, shapes: Mapping[str, torch.Size], grid: Topology, rank: int) -> list[Debt]:
        """Of what state_dict gives, what the ranks owe, so that another number of ranks can take it over."""
        ...

    def owe(self, shapes: Mapping[str, torch.Size], grid: Topology, rank: int, owed: Owed) -> None:
        """Take over what other ranks owed: this rank's share of a debt whose mean over ranks is `owed(kind, name)`.

        After load_state_dict with the state of their first rank, if the method is the same.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, as tensors and numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict gave."""
        ...


@runtime_checkable
class Forgiving(Protocol):
    """A reduction that owes, and forgives some of it after a step that was clipped."""

    def forgive(self, clip: Clip) -> None:
        """Multiply what is owed by the step's share, or by its factor; see Clipping."""
        ...


def seed_of(seed: int, step: int, name: str) -> int:
    """A seed that all ranks share for one parameter in one step, whatever bucket it lies in."""
    return derive_seed(seed, step, zlib.crc32(name.encode()))


def sum_over_ranks(
    link: Link, tensors: Sequence[Tensor], codec: Codec = FP32, lost: Lost | None = None
) -> Rounds[list[Tensor]]:
    """The sums of tensors of any shapes, fp32 in their shapes, in one message a hop, each in `codec`; see Slices."""
    if not tensors:
        return []
    slices = Slices.of((tensor.numel() for tensor in tensors), link.topology.world_size, codec)
    message = slices.pack(tensors, torch.empty(slices.world_size, slices.length))
    total = yield from all_reduce(link, message, codec, codec, codec, operation=OPERATION, lost=lost)
    return [whole.view(tensor.shape) for whole, tensor in zip(slices.unpack(total), tensors, strict=True)]


class Mean:
    """g = (1/P) sum_r g_r, in fp32."""

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        yield [AllReduce.start(link, bucket.flat.div_(link.topology.world_size))]

    def sent_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> dict[str, int]:
        return ring_bytes(FP32_BYTES * sum(shape.numel() for shape in shapes.values()), grid)

    def kept_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> dict[str, int]:
        return {}

    def rows(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, str, str]]:
        return [("gradients", "all_reduce in fp32", "by gloo"), BY_FORMULA]

    def forget(self) -> list[str]:
        return []

    def residuals(self) -> dict[str, Tensor]:
        return {}

    def debts(self, shapes: Mapping[str, torch.Size], grid: Topology, rank: int) -> list[Debt]:
        return []

    def owe(self, shapes: Mapping[str, torch.Size], grid: Topology, rank: int, owed: Owed) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class CastMean(Mean):
    """g = sum_r bf16(g_r / P), summed in bf16 hop by hop."""

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        with link.timed("encode_s", OPERATION):
            half = bucket.flat.div_(link.topology.world_size).to(torch.bfloat16)
        yield [AllReduce.start(link, half)]
        with link.timed("decode_s", OPERATION):
            bucket.flat.copy_(half)

    def sent_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> dict[str, int]:
        return ring_bytes(BF16_BYTES * sum(shape.numel() for shape in shapes.values()), grid)

    def rows(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, str, str]]:
        return [("gradients", "all_reduce in bf16", "by gloo, which sums in bf16"), BY_FORMULA]
