"""ZeRO++: quantised weights, weights kept once per node, quantised gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.codecs import Codec, Hadamard, Integer
from thinwire.errors import ConfigError, nearest
from thinwire.layout.formats import WireFormat
from thinwire.methods.fsdp import WIRES, FSDPMethod
from thinwire.methods.loco import LoCo
from thinwire.methods.options import check_types

WIDTHS = {"int8": 8, "int6": 6, "int4": 4, "int3": 3, "int2": 2}


@dataclass(frozen=True)
class ZeroPP(FSDPMethod):
    """ZeRO++: quantised weights, weights kept once per node, quantised gradients in two hops with the exact mean.

    Norms, biases and other parameters of one dimension have a type of their own: they are few, and errors in them weigh
    more.

    Raises ConfigError for another width and for values that the codecs refuse.
    Source: ZeRO++ (ICLR 2024); LoCo (2024) for the error feedback.
    """

    name: ClassVar[str] = "zeropp"

    weights: str = "int8"
    """Type of weights on the wire: int8, int6, int4, int3, int2, bf16 or fp32."""
    weight_group: int = 2048
    """Elements of the weights that share a scale; at least 1."""
    gradients: str = "int4"
    """Type of gradients between nodes: int8, int6, int4, int3, int2, bf16 or fp32."""
    intra_gradients: str = "same"
    """Type of gradients inside a node: same (as between nodes), int8, int6, int4, int3, int2, bf16 or fp32."""
    gradient_group: int = 128
    """Elements of the gradients that share a scale; a multiple of hadamard."""
    hadamard: int = 0
    """Elements in a block of the rotation around gradients, a power of two from 2; 0: no rotation."""
    rounding: str = "nearest"
    """Rounding of integers: nearest or stochastic."""
    vectors: str = "bf16"
    """Type of parameters of one dimension, both ways: bf16, fp32 or int8 (in groups of 64)."""
    secondary: bool = True
    """Keep what a gather brought from other nodes: backward and unchanged weights need nothing from outside."""
    loco: bool = False
    """Error feedback of the gradients (LoCo)."""
    loco_beta: float = 0.8
    """Weight of the old error in the feedback; from 0 to below 1."""
    loco_reset: int = 1024
    """Steps after which the feedback starts afresh; at least 1."""
    reshard_after_forward: bool = True
    """Drop whole weights after forward and gather them again for backward. In the trainer only: in a loop of one's
    own, fully_shard has an option of this name."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0.0 <= self.loco_beta < 1.0:
            raise ConfigError(f"zeropp loco_beta {self.loco_beta}: must be at least 0 and below 1; the paper's is 0.8")
        if self.loco_reset < 1:
            raise ConfigError(f"zeropp loco_reset {self.loco_reset}: must be at least 1; the paper's is 1024")
        self.matrix()
        self.vector()

    def matrix(self) -> WireFormat:
        intra = self.gradients if self.intra_gradients == "same" else self.intra_gradients
        return WireFormat(
            width("weights", self.weights, self.weight_group, "nearest"),
            differences=False,
            intra=self._gradient("intra_gradients", intra),
            inter=self._gradient("gradients", self.gradients),
        )

    def vector(self) -> WireFormat:
        codec = width("vectors", self.vectors, 64, "nearest")
        return WireFormat(codec, differences=False, intra=codec, inter=codec)

    def gradient_memory(self, numels: Sequence[int]) -> LoCo | None:
        """LoCo's errors, where they are asked for."""
        return LoCo(numels, self.loco_beta, self.loco_reset) if self.loco else None

    def _gradient(self, option: str, name: str) -> Codec:
        codec = width(option, name, self.gradient_group, self.rounding)
        return Hadamard(codec, self.hadamard) if self.hadamard and isinstance(codec, Integer) else codec


def width(option: str, name: str, group: int, rounding: str) -> Codec:
    """The codec called `name`; raises ConfigError that names the option."""
    if name in WIRES:
        return WIRES[name]
    if name not in WIDTHS:
        raise ConfigError(f"zeropp {option} {name!r}: no such width{nearest(name, [*WIDTHS, *WIRES])}")
    return Integer(WIDTHS[name], group, rounding)
