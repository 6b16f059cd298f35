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

    Gradients in groups of 64 with bf16 scales take the bits of the paper's groups of 128 with fp32 scales, and lose
    less.

    Raises ConfigError for values the codecs refuse. Source: SDP4Bit, NeurIPS 2024.
    """

    name: ClassVar[str] = "sdp4bit"

    weights: bool = True
    """Compress weight differences; off: weights travel exactly, in fp32."""
    gradients: bool = True
    """Compress gradients; off: they travel exactly, in fp32."""
    weight_bits: int = 4
    """Bits of an element of a weight difference: 2, 3, 4, 6 or 8."""
    weight_group: int = 2048
    """Elements of a weight difference that share a scale; at least 1."""
    intra_bits: int = 8
    """Bits of an element of a gradient inside a node: 2, 3, 4, 6 or 8."""
    intra_group: int = 64
    """Elements of a gradient that share a scale inside a node; a multiple of hadamard."""
    inter_bits: int = 4
    """Bits of an element of a gradient between nodes: 2, 3, 4, 6 or 8."""
    inter_group: int = 64
    """Elements of a gradient that share a scale between nodes; a multiple of hadamard."""
    hadamard: int = 32
    """Elements in a block of the rotation around gradients, a power of two from 2; 0: no rotation."""
    rounding: str = "stochastic"
    """Rounding of all integers: stochastic or nearest."""
    weight_scale: str = "fp32"
    """Type of the scales of weight differences: fp32 or bf16."""
    gradient_scale: str = "bf16"
    """Type of the scales of gradients: fp32 or bf16."""
    vector_bits: int = 8
    """Bits of an element of norms and biases, in both directions and on both hops: 2, 3, 4, 6 or 8."""
    vector_group: int = 128
    """Elements of norms and biases that share a scale; a multiple of hadamard."""
    entropy_coding: bool = False
    """Compress what crosses between nodes once more, without loss."""

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
