"""The options of an outer method, and its schedule: which fragment is sent after which step."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.codecs import Codec, Identity
from thinwire.errors import ConfigError
from thinwire.layout.layout import Layout
from thinwire.methods.outer.correction import ProximalCorrection
from thinwire.methods.outer.parameters import Nesterov, OuterState


@dataclass(frozen=True)
class Schedule:
    """Fragment p of P is sent after step t if t > t_p and H divides t - t_p, t_p = round(p H / P).

    With H >= P no two fragments are sent after the same step.

    Args:
        sync_every: H, steps between two exchanges of one fragment.
        overlap_steps: steps that an exchange may take before its result is awaited.
        start_after: up to this step everything is exchanged after every step; t counts from it.

    Raises ConfigError for numbers that contradict each other.
    Source: Douillard et al., "Streaming DiLoCo with overlapping communication" (2025), section 3.1; for start_after:
    Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD" (ICLR 2020).
    """

    sync_every: int
    num_fragments: int = 1
    overlap_steps: int = 0
    start_after: int = 0

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ConfigError(f"sync_every {self.sync_every}: must be at least 1; nearest: 1")
        if not 0 <= self.overlap_steps < self.sync_every:
            raise ConfigError(
                f"overlap_steps {self.overlap_steps}: a fragment must have arrived before it is sent again, so from 0 "
                f"to sync_every - 1; nearest: {min(max(self.overlap_steps, 0), self.sync_every - 1)}"
            )
        if self.start_after < 0:
            raise ConfigError(f"start_after {self.start_after}: must be at least 0; nearest: 0")

    def offset(self, fragment: int) -> int:
        """t_p."""
        return (2 * fragment * self.sync_every + self.num_fragments) // (2 * self.num_fragments)

    def due(self, step: int) -> list[int]:
        """The fragments that are sent after `step`, counted from 1."""
        if step <= self.start_after:
            return list(range(self.num_fragments))
        since = step - self.start_after
        offsets = [self.offset(fragment) for fragment in range(self.num_fragments)]
        return [p for p, first in enumerate(offsets) if since > first and (since - first) % self.sync_every == 0]


@dataclass(frozen=True)
class OuterMethod:
    """Inner steps on every island, and regular outer steps that all islands take together.

    After H inner steps an island sends D = x - w, the outer parameters x minus its own weights w, with `codec`. tau
    steps later it takes the outer step with the mean D, and continues with mix * w + (1 - mix) * x. With error feedback
    it sends C(e) in place of D, where e <- beta e + D, and keeps e <- e - C(e) for the next time.

    Args:
        sync_every: H.
        num_fragments, pattern: see `cut`.
        overlap_steps: tau.
        start_after: see Schedule.
        outer_lr, outer_momentum: see Nesterov.
        correction: see ProximalCorrection; of the whole model, without overlap.
        rejoin_steps: see Rewarming.
        error_decay: beta; None: no error feedback.

    Raises ConfigError for values out of range, and for values that contradict each other.
    """

    sync_every: int
    num_fragments: int | None = 1
    pattern: str = "strided"
    overlap_steps: int = 0
    mix: float = 0.0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    codec: Codec = field(default_factory=Identity)
    start_after: int = 0
    correction: ProximalCorrection | None = None
    rejoin_steps: int = 10
    error_decay: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.mix < 1:
            nearest = 0.9 if self.mix >= 1 else 0
            raise ConfigError(
                f"mix {self.mix}: must be at least 0, and below 1, at which nothing would be learnt; nearest: {nearest}"
            )
        if self.rejoin_steps < 0:
            raise ConfigError(f"rejoin_steps {self.rejoin_steps}: must be at least 0; nearest: 0")
        if self.pattern == "sequential" and self.num_fragments == 1:
            raise ConfigError("pattern sequential: no effect on one fragment; leave it out, or take more num_fragments")
        if self.start_after and self.sync_every == 1:
            raise ConfigError(
                f"start_after {self.start_after}: no effect where sync_every 1 exchanges after every step; leave it out"
            )
        if self.start_after and self.overlap_steps:
            raise ConfigError(f"start_after {self.start_after}: exchanges after every step leave nothing to overlap")
        if self.correction and (self.num_fragments != 1 or self.overlap_steps or self.mix):
            raise ConfigError("the FedSpeed correction needs one fragment, no overlap_steps and mix 0")
        if self.error_decay is not None:
            self._check_feedback(self.error_decay)
        self.schedule(1)
        Nesterov(self.outer_lr, self.outer_momentum)

    def _check_feedback(self, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"error_decay {decay}: must be from 0 to 1; nearest: {1 if decay > 1 else 0}")
        if not self.codec.traits.contraction:
            raise ConfigError(
                f"codec {self.codec} with error feedback: may lose more than it is given, and errors would grow; take "
                "one that is a contraction, such as topk1%, sign or int4:nearest (`thinwire codecs` shows which are)"
            )
        if self.correction:
            raise ConfigError("fedspeed needs all of what islands send at once: leave error_decay out")

    def schedule(self, num_fragments: int) -> Schedule:
        """Which fragment is sent when."""
        return Schedule(self.sync_every, num_fragments, self.overlap_steps, self.start_after)

    def state(self, fragments: list[Layout]) -> OuterState:
        """The state that an island's first rank keeps between exchanges."""
        return OuterState(
            fragments, has_momentum=self.outer_momentum > 0, is_corrected=self.correction is not None,
            has_feedback=self.error_decay is not None,
        )  # fmt: skip

    @property
    def rule(self) -> Nesterov:
        """The outer optimizer."""
        return Nesterov(self.outer_lr, self.outer_momentum)
