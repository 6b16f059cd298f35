"""ZeRO++: quantised weights, weights kept once per node, quantised gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.layout.formats import WireFormat
from thinwire.methods.fsdp import FSDPMethod
from thinwire.methods.loco import LoCoOptions
from thinwire.methods.options import REPEATABLE, check_types, codec_of


@dataclass(frozen=True)
class ZeroPP(LoCoOptions, FSDPMethod):
    """ZeRO++: quantised weights, weights kept once per node, quantised gradients in two hops with the exact mean.

    Norms, biases and other parameters of one dimension have a codec of their own: they are few, and errors in them
    weigh more.

    Raises ConfigError for a text that is no codec, and for weights that would be rounded at random.
    Source: ZeRO++ (ICLR 2024); LoCo (2024) for the error feedback.
    """

    name: ClassVar[str] = "zeropp"

    weights: str = "int8/2048:nearest"
    """Codec of weights, which must give the same every time: no stochastic rounding."""
    inter_gradients: str = "int4/128:nearest"
    """Codec of gradients between nodes."""
    intra_gradients: str = "int4/128:nearest"
    """Codec of gradients inside a node."""
    vectors: str = "bf16"
    """Codec of parameters of one dimension, weights and gradients: no stochastic rounding."""
    secondary: bool = True
    """Keep the packets that came from other nodes, so that backward and unchanged weights need none from outside."""
    reshard_after_forward: bool = True
    """Drop whole weights after forward and gather them again for backward. `compress_fsdp` keeps the setting of
    fully_shard, and prints it."""

    def __post_init__(self) -> None:
        check_types(self)
        self.check_loco(self.matrix(), self.vector())

    def matrix(self) -> WireFormat:
        return WireFormat(
            codec_of(self, "weights", REPEATABLE),
            differences=False,
            intra=codec_of(self, "intra_gradients"),
            inter=codec_of(self, "inter_gradients"),
        )

    def vector(self) -> WireFormat:
        codec = codec_of(self, "vectors", REPEATABLE)
        return WireFormat(codec, differences=False, intra=codec, inter=codec)
