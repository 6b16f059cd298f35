"""torch's DistributedDataParallel over gloo, in fp32 or bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.collectives.link import Link
from thinwire.collectives.ring import BY_FORMULA, AllReduce, ring_bytes
from thinwire.collectives.rounds import Rounds
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.options import FLOAT, check_types, codec_of
from thinwire.methods.reduction import OPERATION, Bucket, Reduction, Step
from thinwire.state.memory import Place
from thinwire.table import Row


class Mean(Reduction):
    """g = (1/P) sum_r g_r, in fp32."""

    is_metered = False
    element_bytes = 4
    effect = ("all_reduce in fp32", "by gloo")

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        yield [AllReduce.start(link, OPERATION, bucket.flat.div_(link.topology.world_size))]

    def sent_bytes(self) -> dict[str, int]:
        shapes = self.place.shapes.values()
        return ring_bytes(self.element_bytes * sum(shape.numel() for shape in shapes), self.place.grid)

    def rows(self) -> list[Row]:
        return [("gradients", *self.effect), BY_FORMULA]


class CastMean(Mean):
    """g = sum_r bf16(g_r / P), summed in bf16 hop by hop."""

    element_bytes = 2
    effect = ("all_reduce in bf16", "by gloo, which sums in bf16")

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        with link.timed("encode_s", OPERATION):
            half = bucket.flat.div_(link.topology.world_size).to(torch.bfloat16)
        yield [AllReduce.start(link, OPERATION, half)]
        with link.timed("decode_s", OPERATION):
            bucket.flat.copy_(half)


@dataclass(frozen=True)
class DDP(DDPMethod):
    """torch's DistributedDataParallel over gloo: one all_reduce of the gradients, the optimizer's state on every rank.

    Sends 2 (P-1)/P times the gradients' bytes per step. Weights, masters and the optimizer stay fp32.

    Raises ConfigError for another codec. Source: Li et al., "PyTorch Distributed", VLDB 2020.
    """

    codec: str = "fp32"
    """Codec of the gradients: fp32, or bf16, in which they are divided by P, cast, summed on the way and cast back."""
    find_unused_parameters: bool = False
    """DDP's own option; set it for a model that leaves out parameters in some steps."""

    def __post_init__(self) -> None:
        check_types(self)
        codec_of(self, "codec", FLOAT)

    @property
    def name(self) -> str:
        return "ddp" if self.codec == "fp32" else f"ddp-{self.codec}"

    def reduction(self, place: Place, seed: int) -> Reduction:
        return (Mean if self.codec == "fp32" else CastMean)(place)
