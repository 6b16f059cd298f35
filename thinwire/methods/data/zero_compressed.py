"""Any gradient codec with error feedback on the sharded host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.codecs import Identity
from thinwire.layout.formats import WireFormat
from thinwire.methods.options import check_types, codec_of, with_feedback
from thinwire.methods.sharded import ShardedMethod, as_differences


@dataclass(frozen=True)
class ZeroCompressed(ShardedMethod):
    """Sparse or few-bit gradients between nodes on the sharded optimizer, with error feedback; fp32 inside a node.

    Gradients of norms and biases travel in fp32.

    Raises ConfigError for a codec that does not fit its place. Source: Karimireddy et al., "Error feedback fixes
    SignSGD" (ICML 2019), on every hop of a sharded sum.
    """

    name: ClassVar[str] = "zero-compressed"

    gradients: str = "sign/512"
    """Codec of the gradients of matrices between nodes, such as topk1%/1024 or randomk1%:bf16:biased."""
    error_feedback: bool | None = None
    """Keep what the codec loses, and send it later; by default where the codec is not unbiased, which can't do
    without."""
    weights: str = "int4/2048"
    """Codec of the weights; all but fp32 and bf16 carry their differences."""
    vector_weights: str = "int8/128"
    """Codec of the weights of norms and biases, as of the others."""

    def __post_init__(self) -> None:
        check_types(self)
        self.matrix()
        self.vector()

    @property
    def not_on_fsdp(self) -> str:
        """Why compress_fsdp can't run it, to follow its name; empty: it can."""
        return "keeps error feedback, for which FSDP2 has no place: use thinwire.zero" if self.matrix().feedback else ""

    def matrix(self) -> WireFormat:
        weights = codec_of(self, "weights")
        gradients, feedback = with_feedback(self, "gradients", self.error_feedback)
        return WireFormat(weights, as_differences(weights), intra=Identity(), inter=gradients, feedback=feedback)

    def vector(self) -> WireFormat:
        weights = codec_of(self, "vector_weights")
        return WireFormat(weights, as_differences(weights), intra=Identity(), inter=Identity())
