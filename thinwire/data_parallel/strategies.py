"""What each strategy sends: one frozen dataclass a strategy, one row in STRATEGIES.

Those of `thinwire.zero` are below; those of DistributedDataParallel and FSDP2 lie in their rooms, `ddp` and `fsdp`;
gradients of one byte in `one_byte`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Unpack

import torch
from torch import nn

from thinwire.codecs import Cast, Codec, Hadamard, Identity, Integer, Zstd
from thinwire.data_parallel.ddp.dgc import DGC
from thinwire.data_parallel.ddp.feedback import EFInteger, EFTopK
from thinwire.data_parallel.ddp.lgreco import LGreCo
from thinwire.data_parallel.ddp.onebit_adam import OneBitAdam
from thinwire.data_parallel.ddp.powersgd import PowerSGD
from thinwire.data_parallel.ddp.sketch import Sketch
from thinwire.data_parallel.ddp.strategies import DDP
from thinwire.data_parallel.ddp.torch_powersgd import TorchPowerSGD
from thinwire.data_parallel.ddp.two_way import TwoWay
from thinwire.data_parallel.frontier.strategies import Frontier
from thinwire.data_parallel.fsdp.strategies import FSDP, ZeroPP
from thinwire.data_parallel.gradient_codecs import GradientCodec
from thinwire.data_parallel.interface import CUTS_TENSORS, ParallelOptimizer, RankOptions, TrainingStrategy
from thinwire.data_parallel.islands.strategies import ISLANDS
from thinwire.data_parallel.one_byte.strategy import OneByte
from thinwire.data_parallel.options import check_types
from thinwire.data_parallel.wire import Strategy, WireFormat
from thinwire.errors import ConfigError, nearest
from thinwire.optim import ELEMENTWISE


class OnZero:
    """What makes a choice of codecs a TrainingStrategy: it is applied by `thinwire.zero`."""

    settled_after: ClassVar[int] = 0
    optimizers: ClassVar[tuple[str, ...]] = ELEMENTWISE
    optimizers_reason: ClassVar[str] = CUTS_TENSORS

    @property
    def codecs(self: Strategy) -> tuple[Codec, ...]:
        """Whose kernels are compiled before the workers start."""
        return (*self.matrix().codecs, *self.vector().codecs)

    def apply(
        self: Strategy,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        overlap: bool,
        **options: Unpack[RankOptions],
    ) -> tuple[nn.Module, ParallelOptimizer]:
        """See TrainingStrategy."""
        # It imports this file for its default.
        from thinwire.data_parallel.zero import zero

        return zero(model, optimizer, self, overlap=overlap, announce=False, **options)


@dataclass(frozen=True)
class Zero(OnZero):
    """Sharded optimizer with fp32 both ways: the exact reference; 8 (P-1)/P bytes per parameter and step."""

    name: ClassVar[str] = "zero"

    def matrix(self) -> WireFormat:
        return WireFormat(Identity(), differences=False, intra=Identity(), inter=Identity())

    vector = matrix


@dataclass(frozen=True)
class ZeroBF16(OnZero):
    """Weights and gradients travel as bf16, masters and sums stay fp32; 4 (P-1)/P bytes per parameter and step."""

    name: ClassVar[str] = "zero-bf16"

    def matrix(self) -> WireFormat:
        return WireFormat(Cast("bf16"), differences=False, intra=Cast("bf16"), inter=Cast("bf16"))

    vector = matrix


@dataclass(frozen=True)
class SDP4Bit(OnZero):
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


@dataclass(frozen=True)
class ZeroCompressed(OnZero):
    """Sparse or few-bit gradients between nodes on the sharded optimizer, with error feedback; fp32 inside a node.

    codec: of the gradients of matrices: "sign", "topk", "randomk", "natural" or "integer". density: of topk and
    randomk, 0.01 by default. bits: of natural and integer, 4 by default. error_feedback: on by default for sign, topk
    and randomk; off, randomk, natural and integer take their unbiased form. weights: "int4" differences as SDP4Bit's,
    "bf16" or "fp32". Gradients of norms and biases travel in fp32.

    Raises ConfigError for values that do not fit each other. Source: Karimireddy et al., "Error feedback fixes SignSGD"
    (ICML 2019), on every hop of a sharded sum.
    """

    name: ClassVar[str] = "zero-compressed"

    codec: str = "sign"
    density: float | None = None
    bits: int | None = None
    error_feedback: bool | None = None
    weights: str = "int4"

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

STRATEGIES: dict[str, Callable[..., TrainingStrategy]] = {
    "zero": Zero,
    "zero-bf16": ZeroBF16,
    "zero-compressed": ZeroCompressed,
    "sdp4bit": SDP4Bit,
    "sdp4bit-weights": partial(SDP4Bit, gradients=False),
    "sdp4bit-gradients": partial(SDP4Bit, weights=False),
    "ddp": DDP,
    "ddp-bf16": partial(DDP, wire="bf16"),
    "powersgd": PowerSGD,
    "powersgd-torch": TorchPowerSGD,
    "two-way": TwoWay,
    "dgc": DGC,
    "onebit-adam": OneBitAdam,
    "ef-topk": EFTopK,
    "ef-integer": EFInteger,
    "lgreco-powersgd": LGreCo,
    "lgreco-ef-topk": partial(LGreCo, base=EFTopK()),
    "lgreco-ef-integer": partial(LGreCo, base=EFInteger()),
    "lgreco-dgc": partial(LGreCo, base=DGC()),
    "sketch": Sketch,
    "fsdp": FSDP,
    "fsdp-bf16": partial(FSDP, wire="bf16"),
    "frontier": Frontier,
    "zeropp": ZeroPP,
    "one-byte": OneByte,
    **ISLANDS,
}


def strategy_named(name: str, **options: object) -> TrainingStrategy:
    """The strategy registered under `name`; raises ConfigError that names the nearest one."""
    if name not in STRATEGIES:
        raise ConfigError(f"unknown strategy {name!r}{nearest(name, STRATEGIES)}")
    return STRATEGIES[name](**options)
