"""DiLoCo, Streaming DiLoCo and local SGD as strategies: an outer method around any strategy inside an island."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Peers, Topology
from thinwire.errors import ConfigError
from thinwire.layout.fragments import Fragment, cut
from thinwire.methods.data.ddp import DDP
from thinwire.methods.interface import CUTS_TENSORS, Method, Plan, trained_shapes
from thinwire.methods.islands.exchange import COMMIT, OPERATION, message_bytes
from thinwire.methods.islands.fedspeed import FedSpeed
from thinwire.methods.islands.method import OuterMethod, codec_named
from thinwire.methods.islands.outer import NUM_WORDS
from thinwire.methods.options import check_types


class IslandsMethod:
    """What makes the options of an outer method a Method.

    The default group is one island; `among` says which others there are.
    """

    name: ClassVar[str]
    # Of its options: what flags and TOML call them.
    table: ClassVar[str]
    inner: Method

    def method(self) -> OuterMethod:
        """What the options amount to; raises ConfigError for what does not fit."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ConfigError for options or an inner strategy that can't work."""
        check_types(self)
        self.method()
        if isinstance(self.inner, IslandsMethod):
            raise ConfigError(f"{self.name} inside {self.name}: islands have no islands; nearest: --inner ddp")
        if self.inner.name == "one-byte":
            raise ConfigError(
                "one-byte inside an island keeps a log of all that was applied, which exchanges would not be in; "
                "nearest: --inner ddp"
            )

    def fragments(self, model: nn.Module) -> list[Fragment]:
        """What of `model` is exchanged together; raises ConfigError where the options do not fit it."""
        method = self.method()
        return cut(model, method.num_fragments, method.pattern, method.codec.block)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Whose kernels are compiled before the workers start."""
        return self.method().codec, *self.inner.codecs

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Those of the inner strategy."""
        return self.inner.optimizers

    @property
    def optimizers_reason(self) -> str:
        """Why the inner strategy can't drive others."""
        return self.inner.optimizers_reason

    @property
    def settled_after(self) -> int:
        """As of the inner strategy."""
        return self.inner.settled_after

    def among(self, peers: Peers | Callable[[], Peers | None] | None, terms: str = "") -> AmongIslands:
        """The strategy of an island that has peers, which its first rank alone knows, or meets by a function.

        terms: what all islands must have in common, besides the model and the options.
        """
        return AmongIslands(self, peers, terms)

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> Plan:
        """The inner strategy's on one island, a node; exchanges between them are spread over the steps between.

        The rank that is shown is an island's first, which alone sends to others. Where the inner strategy shards, whole
        weights are gathered inside the island for each exchange.
        """
        method = self.method()
        island = Topology(1, topology.local_size)
        found = self.inner.plan(model, island, micro_batches)
        fragments = self.fragments(model)
        others, neighbours, every = topology.num_nodes - 1, topology.local_size - 1, method.sync_every
        whole = 4 * sum(shape.numel() for shape in trained_shapes(model).values())
        messages = others * sum(message_bytes(method.codec, fragment.numel) for fragment in fragments)
        sent = {(OPERATION, "inter"): messages, (COMMIT, "inter"): others * len(fragments)}
        sent["broadcast", "intra"] = neighbours * sum(4 * (fragment.numel + NUM_WORDS) for fragment in fragments)
        if self.inner.optimizers_reason == CUTS_TENSORS:
            sent["masters", "intra"] = (1 + bool(method.mix)) * neighbours * whole // topology.local_size
        spread = {key: -(-num_bytes // every) for key, num_bytes in sent.items()}
        outer = 2 * 4 * sum(fragment.numel for fragment in fragments)
        return Plan(
            found.weights, found.gradients, found.optimizer, dict(found.sent) | spread, found.passing,
            crossing=spread[OPERATION, "inter"] + spread[COMMIT, "inter"],
            other=dict(found.other) | {"outer parameters and momentum": outer},
        )  # fmt: skip


@dataclass(frozen=True)
class AmongIslands:
    """A strategy that has been told of its peers."""

    strategy: IslandsMethod
    peers: Peers | Callable[[], Peers | None] | None
    terms: str = ""


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
