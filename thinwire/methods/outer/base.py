"""The base of methods with an outer optimizer, around any strategy inside an island."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Peers, Topology
from thinwire.errors import ConfigError, nearest_divisor
from thinwire.layout.fragments import cut
from thinwire.layout.layout import Layout
from thinwire.methods.front import Front
from thinwire.methods.interface import Method, MethodPlan, trained_shapes
from thinwire.methods.options import check_types
from thinwire.methods.outer.ascent import Ascent
from thinwire.methods.outer.correction import CorrectionState
from thinwire.methods.outer.exchange import COMMIT, OPERATION, message_bytes
from thinwire.methods.outer.method import OuterMethod
from thinwire.methods.outer.parameters import NUM_WORDS
from thinwire.methods.plain_ddp import DDP
from thinwire.methods.schedule import END, FIRST, PlannedExchanges, plain


@dataclass(frozen=True)
class IslandsMethod(Front, Method):
    """Options of an outer method: a Method, and the context around your own loop.

    The default group is one island; `connected_to` adds the others. Raises ConfigError for options or an inner strategy
    that can't work.
    """

    name: ClassVar[str]
    shards_optimizer: ClassVar[bool] = False
    # Numbers of steps between exchanges that are worth trying, besides the default.
    periods: ClassVar[tuple[int, ...]] = ()
    not_inside_islands: ClassVar[str] = "is itself a method of islands, and islands have no islands"

    inner: Method = field(default_factory=DDP, kw_only=True)
    """The strategy inside each island."""
    sync_every: int = 100
    """Inner steps H between two exchanges of one fragment; at least 1."""
    codec: str = field(default="fp32", kw_only=True)
    """Codec of messages between islands, such as bf16 or e3m0/256:bf16:nearest (powers of two in 4 bits)."""
    rejoin_steps: int = field(default=10, kw_only=True)
    """Steps over which the learning rate rises again on an island that has joined others without optimizer state; at
    least 0."""
    ascent: float | None = field(default=None, kw_only=True)
    """rho of FedSpeed's ascent: how far uphill the second gradient of a step is taken, above 0. Doubles the computing.

    The
    paper's is 0.1; by default there is none."""
    ascent_share: float = field(default=1.0, kw_only=True)
    """alpha of FedSpeed's ascent: share of the uphill gradient in a step, above 0 and at most 1.

    The rest is the gradient
    at the weights."""

    @property
    def climb(self) -> Ascent | None:
        """FedSpeed's ascent; None: not used. Raises ConfigError for values out of range."""
        return None if self.ascent is None else Ascent(self.ascent, self.ascent_share)

    @property
    def num_passes(self) -> int:
        """See Method."""
        return 1 if self.climb is None else 2

    @property
    def no_local_gradient(self) -> str:
        """See Method; the inner strategy decides."""
        return self.inner.no_local_gradient

    @property
    def not_on_mesh(self) -> str:
        """The reason of the inner strategy, or of the ascent."""
        if self.climb is not None:
            return "climbs along a rank's whole gradient, of which a tensor axis leaves it a part: leave ascent out"
        return self.of_inner(self.inner.not_on_mesh)

    @property
    def exchanges_every(self) -> int:
        """See Method."""
        return self.sync_every

    @property
    def worth_trying(self) -> Sequence[Mapping[str, Any]]:
        """See Method: other periods."""
        return [{"sync_every": period} for period in self.periods]

    @property
    def not_measured(self) -> str:
        """See Method."""
        return "takes steps at each island's own pace, and islands may come later"

    def not_compiled(self, topology: Topology) -> str:
        """See Method; the inner strategy decides."""
        return self.of_inner(self.inner.not_compiled(topology))

    def of_inner(self, reason: str) -> str:
        """What the inner strategy can't do, which follows its name, to follow this method's; empty: nothing."""
        return f"trains its islands with {self.inner.name}, which {reason}" if reason else ""

    def check_model(self, model: nn.Module) -> None:
        """See `fragments`."""
        self.fragments(model)

    def outer(self) -> OuterMethod:
        """The outer method of these options. Raises ConfigError for options that don't fit."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        check_types(self)
        self.outer()
        if self.inner.not_inside_islands:
            raise ConfigError(
                f"{self.inner.name} inside an island {self.inner.not_inside_islands}; nearest: --inner ddp"
            )
        if self.climb is None and self.ascent_share != 1:
            raise ConfigError(f"ascent_share {self.ascent_share:g}: no effect without ascent; leave it out")
        if self.climb is not None and self.inner.no_local_gradient:
            raise ConfigError(
                f"ascent {self.ascent:g} moves along a rank's own gradient, and {self.inner.name} inside an island "
                f"{self.inner.no_local_gradient}; nearest: --inner sdp4bit, or leave ascent out"
            )

    def fragments(self, model: nn.Module) -> list[Layout]:
        """The parameters of `model` that are exchanged together.

        Raises ConfigError if the options don't fit the model.
        """
        method = self.outer()
        return cut(model, method.num_fragments, method.pattern, method.codec.block)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs whose kernels are compiled before the workers start."""
        return self.outer().codec, *self.inner.codecs

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The optimizers of the inner strategy."""
        return self.inner.optimizers

    @property
    def optimizers_reason(self) -> str:
        """Why the inner strategy can't drive others."""
        return self.inner.optimizers_reason

    @property
    def settled_after(self) -> int:
        """Steps of the inner strategy."""
        return self.inner.settled_after

    def warm(self) -> None:
        """See Method; the inner strategy's."""
        self.inner.warm()

    def connected_to(self, peers: Peers | Callable[[], Peers | None] | None, options: str = "") -> Connected:
        """The strategy of an island with peers, which only its first rank knows, or a function that meets them.

        options: a hash of the options that must be equal on all islands, besides the model and the method.
        """
        return Connected(self, peers, options)

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """The inner strategy's plan on one island, a node. Exchanges are spread over the steps between them.

        It is the plan of an island's first rank, the only one that sends to other islands. If the inner strategy
        shards, whole weights are gathered inside the island for each exchange.
        """
        return self.plan_around(model, model, topology, micro_batches)

    def plan_around(
        self, model: nn.Module, whole: nn.Module, topology: Topology, micro_batches: int, tensor: int = 1
    ) -> MethodPlan:
        """See `plan`, of islands with a tensor axis of `tensor` ranks: `model` is what a rank has of the `whole` one.

        Islands exchange whole parameters. The ranks' word on a step goes to all of an island. Raises ConfigError for an
        axis that islands don't hold.
        """
        if topology.local_size % tensor:
            raise ConfigError(
                f"a tensor axis of {tensor} ranks does not divide an island's {topology.local_size} ranks; nearest: "
                f"{nearest_divisor(tensor, topology.local_size)}"
            )
        method = self.outer()
        island = Topology(1, topology.local_size // tensor)
        found = self.inner.plan(model, island, micro_batches)
        inside = dict(found.sent)
        if tensor > 1:
            word = self.inner.plan(whole, Topology(1, 2), 1).sent["all_gather_exact", "intra"]
            inside["all_gather_exact", "intra"] = word * (topology.local_size - 1)
        fragments, spread = self.fragments(whole), self.spread(model, whole, topology, tensor)
        other = method.state(fragments).kept_bytes()
        if method.correction is not None:
            parts = island.local_size if self.inner.shards_optimizer else 1
            kept = CorrectionState(trained_shapes(model)).kept_bytes()
            other |= {row: num_bytes // parts for row, num_bytes in kept.items()}
        if self.climb is not None:
            other["weights before the ascent"] = 4 * sum(shape.numel() for shape in trained_shapes(model).values())
        return MethodPlan(
            found.weights, found.gradients, found.optimizer, inside | spread, found.passing,
            crossing=spread[OPERATION, "inter"] + spread[COMMIT, "inter"],
            other=dict(found.other) | other,
        )  # fmt: skip

    def spread(
        self, model: nn.Module, whole: nn.Module, topology: Topology, tensor: int = 1, widths: Sequence[int] = ()
    ) -> dict[tuple[str, str], int]:
        """Bytes that an island's first rank sends in an exchange, spread over the steps between; see `plan_around`.

        widths: elements of each stage of a pipeline; of what is gathered inside a stage, all are taken to hold as much.
        """
        method, fragments = self.outer(), self.fragments(whole)
        others, neighbours, every = topology.num_nodes - 1, topology.local_size - 1, method.sync_every
        parts, wholes = trained_shapes(model), trained_shapes(whole)
        messages = others * sum(message_bytes(method.codec, fragment.numel) for fragment in fragments)
        sent = {(OPERATION, "inter"): messages, (COMMIT, "inter"): others * len(fragments)}
        sent["broadcast", "intra"] = neighbours * sum(4 * (fragment.numel + NUM_WORDS) for fragment in fragments)
        times, stages = 1 + bool(method.mix), max(1, len(widths))
        replicas = topology.local_size // tensor // stages
        cut_numel = sum(shape.numel() for name, shape in parts.items() if shape != wholes[name])
        gathered = times * (tensor - 1) * 4 * cut_numel // stages
        if self.inner.shards_optimizer:
            own = sum(shape.numel() for shape in parts.values()) // stages
            gathered += times * (replicas - 1) * 4 * own // replicas
        # The packets of all stages are as long as those of the largest.
        gathered += times * (stages - 1) * 4 * max(widths, default=0)
        if self.inner.shards_optimizer or gathered:
            sent["masters", "intra"] = gathered
        return {key: -(-num_bytes // every) for key, num_bytes in sent.items()}

    def exchanges(self, model: nn.Module, topology: Topology, micro_batches: int) -> PlannedExchanges:
        """The inner strategy's messages inside each island, then an average step's share of the islands' exchanges."""
        inside = self.inner.exchanges(model, Topology(1, topology.local_size), micro_batches)
        return replace(inside, each=(*inside.each, *plain(self.spread(model, model, topology), END, FIRST)))


@dataclass(frozen=True)
class Connected:
    """A method together with the island's peers; see IslandsMethod.connected_to."""

    method: IslandsMethod
    peers: Peers | Callable[[], Peers | None] | None
    options: str = ""


def connect(method: Method, peers: Callable[[], Peers | None], options: Callable[[], str]) -> Method | Connected:
    """The method with the island's peers if it is a method of islands; any other method unchanged.

    options: a hash of the options that must be equal on all islands, besides the model and the method.
    """
    return method.connected_to(peers, options()) if isinstance(method, IslandsMethod) else method
