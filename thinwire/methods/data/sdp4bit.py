"""SDP4Bit: 4-bit weight differences and two-level 4-bit gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.codecs import Identity
from thinwire.errors import ConfigError
from thinwire.layout.formats import WireFormat
from thinwire.methods.loco import LoCoOptions
from thinwire.methods.options import check_types, codec_of
from thinwire.methods.sharded import as_differences
from thinwire.methods.tables import RowsMethod


@dataclass(frozen=True)
class SDP4Bit(LoCoOptions, RowsMethod):
    """Weight differences at 4 bits, gradients at 8 bits inside a node and 4 bits between nodes, Hadamard-rotated.

    Gradients in groups of 64 with bf16 scales take the bits of the paper's groups of 128 with fp32 scales, and lose
    less. With loco, what gradients lose on both hops is averaged over time and added to the next.

    Raises ConfigError for texts that are no codecs, and for weights that lose more than they send.
    Source: SDP4Bit, NeurIPS 2024; LoCo (2024) for the error feedback.
    """

    name: ClassVar[str] = "sdp4bit"

    weights: str = "int4/2048"
    """Codec of the weights; all but fp32 and bf16 carry their differences."""
    intra_gradients: str = "int8/64:bf16+hadamard32"
    """Codec of gradients inside a node."""
    inter_gradients: str = "int4/64:bf16+hadamard32"
    """Codec of gradients between nodes."""
    vector_weights: str = "int8/128"
    """Codec of the weights of norms and biases, as of the others."""
    vector_gradients: str = "int8/128:bf16+hadamard32"
    """Codec of the gradients of norms and biases, on both hops."""

    def __post_init__(self) -> None:
        check_types(self)
        self.check_loco(self.matrix(), self.vector())
        if all(codec == Identity() for codec in self.codecs):
            raise ConfigError("sdp4bit with everything in fp32 compresses nothing; use strategy 'zero'")

    @property
    def worth_trying(self) -> Sequence[Mapping[str, Any]]:
        # More bits where links are fast, fewer where those inside a node are slow too.
        return {"inter_gradients": self.intra_gradients}, {"intra_gradients": self.inter_gradients}

    def matrix(self) -> WireFormat:
        weights, intra = codec_of(self, "weights"), codec_of(self, "intra_gradients")
        return WireFormat(weights, as_differences(weights), intra, codec_of(self, "inter_gradients"))

    def vector(self) -> WireFormat:
        weights, gradients = codec_of(self, "vector_weights"), codec_of(self, "vector_gradients")
        return WireFormat(weights, as_differences(weights), gradients, gradients)
