"""What the actions and messages of a pipeline cost, and what its ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.errors import ConfigError
from thinwire.methods.pipeline.plan import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECOMPUTE,
    SCORE,
    SPREAD_KINDS,
    TRAIN,
    WEIGHT,
    Action,
    Bridged,
    PlanMessage,
    Shared,
)


def _check(**values: Iterable[float]) -> None:
    """Raise ConfigError, with all reasons, for what is no number of seconds or bytes."""
    problems = [
        f"{name} {value:g}: must be a number, at least 0; nearest: 0"
        for name, numbers in values.items()
        for value in numbers
        if not value >= 0
    ]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


@dataclass(frozen=True)
class SpreadCosts:
    """The cost of one micro-batch on each rank, if embedding and head are spread over all ranks.

    seconds: by kind of action; 0 if missing. sizes: bytes of a message, by kind of Shared. kept: bytes kept from S to
    T. Raises ConfigError for a number below 0 or NaN.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    kept: float = 0.0

    def __post_init__(self) -> None:
        _check(seconds=self.seconds.values(), sizes=self.sizes.values(), kept=[self.kept])


@dataclass(frozen=True)
class Costs:
    """The costs of one micro-batch, for each chunk.

    Attributes:
        forward_s, input_s, weight_s: seconds of a forward and of the two halves of its backward. A whole backward takes
            both halves, a recomputation as long as a forward.
        forward_bytes, backward_bytes: of the message with a chunk's output, and of that with the output's gradient.
        kept_bytes: activations that a backward needs.
        input_bytes: bytes kept for a visit that is recomputed.
        spread: of embedding and head, if a plan spreads them.
        tied_bytes: of the weights that the first chunk's rank owns and the last chunk's rank borrows. They go there
            behind the owner's first action, and nothing starts there without them; their gradients come back behind the
            borrower's last backward, and end the step.
        copies: (from, to, bytes) of messages that travel from the start of a step on, and for which nothing waits.

    Raises ConfigError for a number below 0 or NaN.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    forward_bytes: tuple[float, ...]
    backward_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    input_bytes: tuple[float, ...]
    spread: SpreadCosts = field(default=SpreadCosts(), kw_only=True)
    tied_bytes: float = field(default=0.0, kw_only=True)
    copies: tuple[tuple[int, int, float], ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        _check(
            forward_s=self.forward_s, input_s=self.input_s, weight_s=self.weight_s, forward_bytes=self.forward_bytes,
            backward_bytes=self.backward_bytes, kept_bytes=self.kept_bytes, input_bytes=self.input_bytes,
            tied_bytes=[self.tied_bytes], copies=[num_bytes for *_, num_bytes in self.copies],
        )  # fmt: skip

    @classmethod
    def even(
        cls, num_chunks: int, forward_s: float = 1.0, *, input_s: float | None = None, weight_s: float | None = None,
        forward_bytes: float = 0.0, backward_bytes: float | None = None, kept_bytes: float = 1.0,
        input_bytes: float = 0.0,
    ) -> Costs:  # fmt: skip
        """Equal chunks; each half of a backward takes as long as the forward unless stated."""
        each = (
            forward_s, forward_s if input_s is None else input_s, forward_s if weight_s is None else weight_s,
            forward_bytes, forward_bytes if backward_bytes is None else backward_bytes, kept_bytes, input_bytes,
        )  # fmt: skip
        return cls(*((value,) * num_chunks for value in each))

    def seconds(self, action: Action) -> float:
        """Seconds of an action."""
        if action.kind in SPREAD_KINDS:
            return self.spread.seconds.get(action.kind, 0.0)
        if action.kind == BACKWARD:
            return self.input_s[action.chunk] + self.weight_s[action.chunk]
        return {FORWARD: self.forward_s, RECOMPUTE: self.forward_s, INPUT: self.input_s, WEIGHT: self.weight_s}[
            action.kind
        ][action.chunk]

    def num_bytes(self, action: Action, given: PlanMessage) -> float:
        """Bytes of a message that an action gives."""
        if isinstance(given, Shared):
            return self.spread.sizes.get(given.kind, 0.0)
        sizes = self.forward_bytes if given.kind == "forward" else self.backward_bytes
        if isinstance(given, Bridged):
            # As large as the hidden state behind its source.
            return sizes[given.source]
        # Both messages of a border are of the size of the output that crosses it.
        return sizes[action.chunk if given.kind == "forward" else given.chunk]


def peak_bytes(orders: Sequence[Sequence[Action]], costs: Costs) -> tuple[float, ...]:
    """For each rank, the most bytes of activations that it holds at once. Its order alone decides, not the times."""
    return tuple(_peak_bytes(order, costs) for order in orders)


def _peak_bytes(order: Sequence[Action], costs: Costs) -> float:
    recomputed = {action.visit for action in order if action.kind == RECOMPUTE}
    held = peak = 0.0
    for action in order:
        chunk = action.chunk
        if action.kind == FORWARD:
            held += costs.input_bytes[chunk] if action.visit in recomputed else costs.kept_bytes[chunk]
        elif action.kind == RECOMPUTE:
            held += costs.kept_bytes[chunk] - costs.input_bytes[chunk]
        elif action.kind == SCORE:
            held += costs.spread.kept
        peak = max(peak, held)
        if action.kind in (BACKWARD, WEIGHT):
            held -= costs.kept_bytes[chunk]
        elif action.kind == TRAIN:
            held -= costs.spread.kept
    return peak
