"""FedFix: rounds at fixed times; islands of unequal speed do not wait for the slowest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.errors import ConfigError, nearest
from thinwire.methods.options import check_types, codec_of
from thinwire.methods.own_pace.rounds import RoundsMethod
from thinwire.table import Row

WEIGHTINGS = ("ticks", "estimated", "importance")
MAX_TICKS = 10


@dataclass(frozen=True)
class FedFix(RoundsMethod):
    """Train islands of unequal speed on one model; every rank is an island.

    An island starts with the server's model, takes K optimizer steps (a job), sends Delta_i = (its model) - (the model
    it received), and gets the next model. At every tick all ranks add up the Deltas of jobs that ended since the last
    tick:

        theta_{n+1} = theta_n + outer_lr sum_i d_i Delta_i        over the islands that finished a job
        d_i = (ticks that the job took) p_i                       "ticks", unbiased
        d_i = p_i n / max(N_i, 1), for N_i jobs in n ticks        "estimated"
        d_i = p_i                                                 "importance", biased towards fast islands

    `FedFix(model, optimizer, **options)` is the context around your own loop, which all ranks enter. Its other options:
    `on_tick`, called with a Tick on another thread after each tick; `group`, `seed`, `timeout_s`, `checked`,
    `announce`. Every rank keeps the server's model, fp32 on the CPU, with the same bits. When a rank leaves the
    context, it sends the job it has begun, waits until all ranks leave, and gets the server's model.

    Raises ConfigError for options that can't work or differ between ranks; PeerLostError, in `optimizer.step()`, if a
    rank is lost.
    Source: Fraboni, Vidal, Kameni and Lorenzi, "A General Theory for Federated Optimization with Asynchronous and
    Heterogeneous Clients Updates", JMLR 2023 (FedFix).
    """

    name: ClassVar[str] = "fedfix"
    num_vectors: ClassVar[int] = 3

    interval_s: float = 1.0
    """Seconds between two ticks, by rank 0's clock; above 0."""
    local_steps: int = 10
    """Optimizer steps K of one job; at least 1."""
    weighting: str = "ticks"
    """How an island's weight d_i in the sum follows from its speed: ticks, estimated or importance."""
    importance: tuple[float, ...] | None = None
    """p_i, one number for each rank, scaled to a sum of 1; by default all equal."""
    outer_lr: float = 1.0
    """Learning rate of the sum; above 0."""
    max_ticks: int | None = None
    """No d_i is larger than max_ticks p_i; at least 1, by default 10. Refused beside weighting importance."""
    codec: str = "int4/128"
    """Codec of a Delta, each tensor by itself."""
    overlap: bool = False
    """Train on while a Delta travels, and add those steps to the model that comes; off: wait for it."""

    def __post_init__(self) -> None:
        check_types(self)
        if not self.interval_s > 0:
            raise ConfigError(f"interval_s {self.interval_s:g}: above 0")
        for name, value in {"local_steps": self.local_steps, "max_ticks": self.max_ticks}.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}: at least 1")
        if self.outer_lr <= 0:
            raise ConfigError(f"outer_lr {self.outer_lr:g}: above 0; 1 is the paper's")
        if self.weighting not in WEIGHTINGS:
            raise ConfigError(f"weighting {self.weighting!r}{nearest(self.weighting, WEIGHTINGS)}")
        if self.weighting == "importance" and self.max_ticks is not None:
            raise ConfigError(
                f"max_ticks {self.max_ticks}: no effect beside weighting importance, where every job counts p_i; leave "
                "it out, or take weighting ticks or estimated"
            )
        codec_of(self, "codec")

    @property
    def weighting_row(self) -> Row:
        rule = {
            "ticks": "p times the ticks that the job took: unbiased",
            "estimated": "p times aggregations over participations, counted so far",
            "importance": "p alone: fast islands count more",
        }[self.weighting]
        return f"weighting {self.weighting}", rule, "" if self.weighting == "importance" else f"at most {self._limit} p"

    @property
    def most_ticks(self) -> int | None:
        return self._limit if self.weighting == "ticks" else None

    @property
    def _limit(self) -> int:
        return MAX_TICKS if self.max_ticks is None else self.max_ticks

    def importance_of(self, world_size: int) -> list[float]:
        """p, with sum 1. Raises ConfigError unless there is one number above 0 for each rank."""
        given = [1.0] * world_size if self.importance is None else list(self.importance)
        if len(given) != world_size or min(given) <= 0:
            raise ConfigError(f"importance {given}: one number above 0 for each of the {world_size} ranks")
        return [value / sum(given) for value in given]

    def weights_of(
        self, importance: Sequence[float], job_ticks: Sequence[int], num_ticks: int, num_jobs: Sequence[int]
    ) -> list[float]:
        """d_i of islands that have finished a job.

        At a tick island i has the expected weight q_i = E[d_i 1(i has finished)], and the fixed point minimises
        sum_i q_i f_i. This is the minimum of sum_i p_i f_i exactly if q is proportional to p.

        Args:
            importance: p_i.
            job_ticks: ticks that the job took.
            num_ticks: ticks so far, this one included.
            num_jobs: N_i, jobs so far, this one included.
        """
        if self.weighting == "importance":
            return list(importance)
        if self.weighting == "ticks":
            return [min(count, self._limit) * p for count, p in zip(job_ticks, importance, strict=True)]
        shares = [num_ticks / max(count, 1) for count in num_jobs]
        return [p * min(max(share, 1.0), self._limit) for p, share in zip(importance, shares, strict=True)]
