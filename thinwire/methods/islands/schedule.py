"""When which fragment is exchanged."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Fragment p of P is sent after step t where t > t_p and H divides t - t_p, t_p = round(p H / P).

    sync_every: H, steps between two exchanges of one fragment. overlap_steps: steps that an exchange may take before
    its result is waited for. start_after: up to this step everything is exchanged after every step; t counts from it.
    With H >= P no two fragments are sent after one step.

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
        """The fragments that are sent after `step`, which counts from 1."""
        if step <= self.start_after:
            return list(range(self.num_fragments))
        since = step - self.start_after
        offsets = [self.offset(fragment) for fragment in range(self.num_fragments)]
        return [p for p, first in enumerate(offsets) if since > first and (since - first) % self.sync_every == 0]
