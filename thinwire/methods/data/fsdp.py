"""torch's fully_shard over thinwire's collectives, in fp32 or bf16."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import ConfigError, nearest
from thinwire.layout.formats import WireFormat
from thinwire.methods.fsdp import WIRES, FSDPMethod
from thinwire.methods.options import check_types


@dataclass(frozen=True)
class FSDP(FSDPMethod):
    """torch's fully_shard over thinwire's collectives: one all_gather and one reduce_scatter of everything per step.

    Shards are kept whole between forward and backward (reshard_after_forward=False), since on a slow link a second
    gather costs more than the memory. Sends 8 (P-1)/P bytes per parameter and step in fp32, 4 (P-1)/P in bf16.

    Raises ConfigError for another wire. Source: Zhao et al., "PyTorch FSDP", VLDB 2023.
    """

    wire: str = "fp32"
    """Type of weights and gradients on the wire: fp32 or bf16. Masters and sums stay fp32."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.wire not in WIRES:
            raise ConfigError(f"wire {self.wire!r} of fsdp: must be fp32 or bf16{nearest(self.wire, WIRES)}")

    @property
    def name(self) -> str:
        """What `--strategy` calls it."""
        return "fsdp" if self.wire == "fp32" else f"fsdp-{self.wire}"

    def matrix(self) -> WireFormat:
        return WireFormat(WIRES[self.wire], False, WIRES[self.wire], WIRES[self.wire])

    vector = matrix
