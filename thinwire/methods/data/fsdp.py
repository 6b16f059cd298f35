"""torch's fully_shard over thinwire's collectives, in fp32 or bf16."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.layout.formats import WireFormat
from thinwire.methods.fsdp import FSDPMethod
from thinwire.methods.options import FLOAT, check_types, codec_of


@dataclass(frozen=True)
class FSDP(FSDPMethod):
    """torch's fully_shard over thinwire's collectives: one all_gather and one reduce_scatter of everything per step.

    Shards are kept whole between forward and backward (reshard_after_forward=False), since on a slow link a second
    gather costs more than the memory. Sends 8 (P-1)/P bytes per parameter and step in fp32, 4 (P-1)/P in bf16.

    Raises ConfigError for another codec. Source: Zhao et al., "PyTorch FSDP", VLDB 2023.
    """

    codec: str = "fp32"
    """Codec of weights and gradients: fp32 or bf16. Masters and sums stay fp32."""

    def __post_init__(self) -> None:
        check_types(self)
        self.matrix()

    @property
    def name(self) -> str:
        """Name of the strategy in `--strategy`."""
        return "fsdp" if self.codec == "fp32" else f"fsdp-{self.codec}"

    def matrix(self) -> WireFormat:
        codec = codec_of(self, "codec", FLOAT)
        return WireFormat(codec, False, codec, codec)

    vector = matrix
