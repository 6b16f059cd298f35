"""DiLoCo, Streaming DiLoCo and local SGD as strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from thinwire.methods.data.ddp import DDP
from thinwire.methods.interface import Method
from thinwire.methods.islands.base import IslandsMethod
from thinwire.methods.islands.fedspeed import FedSpeed
from thinwire.methods.islands.method import OuterMethod, codec_named


@dataclass(frozen=True)
class DiLoCoMethod(IslandsMethod):
    """DiLoCo: H inner steps on every island, then one outer Nesterov step with the mean of how far they went.

    sync_every: H. outer_lr, outer_momentum: of the outer step. codec: of outer gradients: "fp32", "bf16", "int8",
    "int4" or "e3m0", powers of two in 4 bits. fedspeed: lam of FedSpeed's correction; None: none. rejoin_steps: steps
    over which the learning rate rises again on an island that has come to others, without what its optimizer knew.

    Raises ConfigError for values out of range.
    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023).
    """

    name: ClassVar[str] = "diloco"
    table: ClassVar[str] = "diloco"

    inner: Method = field(default_factory=DDP)
    sync_every: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    codec: str = "fp32"
    fedspeed: float | None = None
    rejoin_steps: int = 10

    def __post_init__(self) -> None:
        self.check()

    def method(self) -> OuterMethod:
        return OuterMethod(
            self.sync_every, outer_lr=self.outer_lr, outer_momentum=self.outer_momentum,
            codec=codec_named(self.codec), rejoin_steps=self.rejoin_steps,
            correction=None if self.fedspeed is None else FedSpeed(self.fedspeed),
        )  # fmt: skip


@dataclass(frozen=True)
class StreamingDiLoCoMethod(IslandsMethod):
    """Streaming DiLoCo: the model in fragments, one after the other, at 4 bits, while inner steps go on.

    sync_every: H, steps between two exchanges of one fragment. num_fragments: at most the model's layers; None: one
    for each three layers. pattern: "strided", layer l goes to fragment l mod P, or "sequential". overlap_steps: steps
    that an exchange may take. mix: share of its own weights that an island keeps when the result arrives. outer_lr,
    outer_momentum, codec, rejoin_steps: as DiLoCo's.

    Raises ConfigError for values out of range.
    Source: Douillard et al., "Streaming DiLoCo with overlapping communication" (2025).
    """

    name: ClassVar[str] = "streaming-diloco"
    table: ClassVar[str] = "streamingdiloco"

    inner: Method = field(default_factory=DDP)
    sync_every: int = 100
    num_fragments: int | None = None
    pattern: str = "strided"
    overlap_steps: int = 1
    mix: float = 0.5
    outer_lr: float = 0.4
    outer_momentum: float = 0.9
    codec: str = "e3m0"
    rejoin_steps: int = 10

    def __post_init__(self) -> None:
        self.check()

    def method(self) -> OuterMethod:
        return OuterMethod(
            self.sync_every, self.num_fragments, self.pattern, self.overlap_steps, self.mix, self.outer_lr,
            self.outer_momentum, codec_named(self.codec), rejoin_steps=self.rejoin_steps,
        )  # fmt: skip


@dataclass(frozen=True)
class LocalSGDMethod(IslandsMethod):
    """Local SGD: every H inner steps each island goes on with the mean of all islands' weights.

    sync_every: H. start_after: up to this step the weights are averaged after every step (post-local SGD). codec,
    fedspeed, rejoin_steps: as DiLoCo's.

    Raises ConfigError for values out of range. Source: Stich, "Local SGD converges fast and communicates little" (ICLR
    2019); Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD" (ICLR 2020).
    """

    name: ClassVar[str] = "local-sgd"
    table: ClassVar[str] = "localsgd"

    inner: Method = field(default_factory=DDP)
    sync_every: int = 16
    start_after: int = 0
    codec: str = "fp32"
    fedspeed: float | None = None
    rejoin_steps: int = 10

    def __post_init__(self) -> None:
        self.check()

    def method(self) -> OuterMethod:
        return OuterMethod(
            self.sync_every, codec=codec_named(self.codec), start_after=self.start_after,
            correction=None if self.fedspeed is None else FedSpeed(self.fedspeed), rejoin_steps=self.rejoin_steps,
        )  # fmt: skip


ISLANDS: dict[str, Callable[..., IslandsMethod]] = {
    "diloco": DiLoCoMethod,
    "streaming-diloco": StreamingDiLoCoMethod,
    "local-sgd": LocalSGDMethod,
}
