"""SDP4Bit: 4-bit weight differences and two-level 4-bit gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.codecs import (
    Codec,
    Hadamard,
    Identity,
    Integer,
    Zstd,
)
from thinwire.errors import ConfigError
from thinwire.layout.formats import WireFormat
from thinwire.methods.options import check_types
from thinwire.methods.sharded import ShardedMethod


@dataclass(frozen=True)
class SDP4Bit(ShardedMethod):
    """Weight differences at 4 bits, gradients at 8 bits inside a node and 4 bits between nodes, Hadamard-rotated.

    weights, gradients: compress this half; off, it travels exactly, in fp32. weight_bits, weight_group: the weight
    differences. intra_*: the gradients' hop inside a node; inter_*: between nodes. hadamard: block of the rotation
    around both gradient codecs, 0 for none. rounding: "stochastic" or "nearest". weight_scale, gradient_scale: "fp32"
    or "bf16" scales; gradients in groups of 64 with bf16 scales take the bits of the paper's groups of 128 with fp32
    scales, and lose less.
    vector_bits, vector_group: norms and biases, in both directions and on both hops. entropy_coding: compress what
    crosses between nodes once more, without loss.

    Raises ConfigError for values the codecs refuse. Source: SDP4Bit, NeurIPS 2024.
    """

    name: ClassVar[str] = "sdp4bit"

    weights: bool = True
    gradients: bool = True
    weight_bits: int = 4
    weight_group: int = 2048
    intra_bits: int = 8
    intra_group: int = 64
    inter_bits: int = 4
    inter_group: int = 64
    hadamard: int = 32
    rounding: str = "stochastic"
    weight_scale: str = "fp32"
    gradient_scale: str = "bf16"
    vector_bits: int = 8
    vector_group: int = 128
    entropy_coding: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if not (self.weights or self.gradients):
            raise ConfigError("sdp4bit with weights and gradients both off compresses nothing; use strategy 'zero'")
        self.matrix()
        self.vector()

    def matrix(self) -> WireFormat:
        weights = Integer(self.weight_bits, self.weight_group, self.rounding, self.weight_scale)
        intra = self._gradient_codec(self.intra_bits, self.intra_group)
        inter = self._gradient_codec(self.inter_bits, self.inter_group)
        return self._format(weights, intra, inter)

    def vector(self) -> WireFormat:
        weights = Integer(self.vector_bits, self.vector_group, self.rounding, self.weight_scale)
        gradients = self._gradient_codec(self.vector_bits, self.vector_group)
        return self._format(weights, gradients, gradients)

    def _gradient_codec(self, bits: int, group: int) -> Codec:
        quantizer = Integer(bits, group, self.rounding, self.gradient_scale)
        return Hadamard(quantizer, self.hadamard) if self.hadamard else quantizer

    def _format(self, weights: Codec, intra: Codec, inter: Codec) -> WireFormat:
        exact = Identity()
        if self.entropy_coding:
            weights, inter = Zstd(weights), Zstd(inter)
        return WireFormat(
            weights if self.weights else exact,
            differences=self.weights,
            intra=intra if self.gradients else exact,
            inter=inter if self.gradients else exact,
        )
