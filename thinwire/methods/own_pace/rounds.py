"""The base of rounds at fixed times: islands send jobs of several steps, and no rank waits for the slowest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.layout.sections import Sections
from thinwire.methods.interface import MethodPlan, trained_shapes
from thinwire.methods.options import codec_of
from thinwire.methods.own_pace.base import OwnPaceMethod
from thinwire.table import Row


class RoundsMethod(OwnPaceMethod):
    """A server's model to which a weighted sum of the islands' jobs is added at every tick of a clock.

    Options of all such methods: interval_s, seconds between two ticks; local_steps, optimizer steps of a job; outer_lr,
    of the sum; codec, of a job's change; overlap, whether an island trains on while its job travels.
    """

    interval_s: float
    local_steps: int
    outer_lr: float
    codec: str
    overlap: bool

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (codec_of(self, "codec"),)

    @property
    def weighting_row(self) -> Row:
        """The row of the start-up table that says how islands are weighted."""
        raise NotImplementedError

    @property
    def most_ticks(self) -> int | None:
        """Number of ticks up to which a job's weight grows with its length; None: it does not grow."""
        raise NotImplementedError

    def importance_of(self, world_size: int) -> list[float]:
        """p, each rank's share of the objective. Raises ConfigError if it does not fit the world."""
        raise NotImplementedError

    def weights_of(
        self, importance: Sequence[float], job_ticks: Sequence[int], num_ticks: int, num_jobs: Sequence[int]
    ) -> list[float]:
        """The weights in the sum of islands that have finished a job.

        Args:
            importance: p_i.
            job_ticks: ticks that the job took.
            num_ticks: ticks so far, this one included.
            num_jobs: N_i, jobs so far, this one included.
        """
        raise NotImplementedError

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """Every rank sends its job to every other once in local_steps. The two bytes of each tick are not counted."""
        self.importance_of(topology.world_size)
        lengths = tuple(shape.numel() for shape in trained_shapes(model).values())
        packet = Sections.alone(codec_of(self, "codec"), lengths, range(len(lengths))).packet_bytes(sum(lengths))
        sent = -(-(topology.world_size - 1) * packet // self.local_steps)
        return self.whole_plan(model, {("hand_in", "inter"): sent})
