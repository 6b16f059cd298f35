"""Any gradient codec with error feedback on the sharded host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.codecs import (
    Cast,
    Codec,
    Identity,
    Integer,
)
from thinwire.errors import ConfigError, nearest
from thinwire.layout.formats import WireFormat
from thinwire.methods.gradient_codecs import GradientCodec
from thinwire.methods.options import check_types
from thinwire.methods.sharded import ShardedMethod


@dataclass(frozen=True)
class ZeroCompressed(ShardedMethod):
    """Sparse or few-bit gradients between nodes on the sharded optimizer, with error feedback; fp32 inside a node.

    Without error feedback, randomk, natural and integer take their unbiased form. Gradients of norms and biases travel
    in fp32.

    Raises ConfigError for values that do not fit each other. Source: Karimireddy et al., "Error feedback fixes SignSGD"
    (ICML 2019), on every hop of a sharded sum.
    """

    name: ClassVar[str] = "zero-compressed"

    codec: str = "sign"
    """Codec of the gradients of matrices: sign, topk, randomk (all ranks draw the same elements), natural (powers of
    two) or integer."""
    density: float | None = None
    """Share of the elements that travels: topk takes 1/1024 to 1, randomk 1/16384 to 1/2. By default 0.01."""
    bits: int | None = None
    """Bits of an element, of natural and integer: 2, 3, 4, 6 or 8. By default 4."""
    error_feedback: bool | None = None
    """Keep what the codec loses, and send it later; by default on for sign, topk and randomk. sign and topk can't
    do without."""
    weights: str = "int4"
    """Type of the weights on the wire: int4 (differences, as SDP4Bit's), bf16 or fp32."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.weights not in WEIGHTS:
            raise ConfigError(f"weights {self.weights!r} of zero-compressed: unknown{nearest(self.weights, WEIGHTS)}")
        self.matrix()

    def matrix(self) -> WireFormat:
        gradients = GradientCodec(self.name, self.codec, self.density, self.bits, self.error_feedback)
        return WireFormat(
            WEIGHTS[self.weights][0],
            differences=self.weights == "int4",
            intra=Identity(),
            inter=gradients.make(),
            feedback=gradients.feeds_back,
        )

    def vector(self) -> WireFormat:
        return WireFormat(WEIGHTS[self.weights][1], self.weights == "int4", intra=Identity(), inter=Identity())


# Codecs of the weights of matrices, and of norms and biases.
WEIGHTS: dict[str, tuple[Codec, Codec]] = {
    "int4": (Integer(4, 2048), Integer(8, 128)),
    "bf16": (Cast("bf16"), Cast("bf16")),
    "fp32": (Identity(), Identity()),
}
