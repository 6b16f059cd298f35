"""Options of a pipeline: the plan, the codecs of its borders, the cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from thinwire.codecs import Codec
from thinwire.cost import Network
from thinwire.errors import ConfigError, Problems, nearest
from thinwire.methods.options import check_types, codec_of
from thinwire.methods.pipeline.across import REPLICAS, STAGES
from thinwire.methods.pipeline.border import Crossing
from thinwire.methods.pipeline.check import check, in_flight
from thinwire.methods.pipeline.costs import Costs
from thinwire.methods.pipeline.cut import SPREAD, stated_sizes
from thinwire.methods.pipeline.fitted import fitted
from thinwire.methods.pipeline.orders import ORDERS, SPREAD_ORDERS, plan
from thinwire.methods.pipeline.plan import Plan, straight
from thinwire.methods.pipeline.recompute import AUTO, MODES, fastest_within, recompute
from thinwire.methods.pipeline.recover import NONE, RECOVERIES, SWAP, check_recovery
from thinwire.methods.pipeline.simulate import simulate
from thinwire.methods.pipeline.skip import path_length, skipping
from thinwire.methods.pipeline.swap import swapping
from thinwire.table import Row

FITTED = "fitted"
# Chunks of layers that a rank may have in a fitted plan.
FITTED_CHUNKS = range(1, 17)


@dataclass(frozen=True)
class Pipeline:
    """Spreads the layers of a model over the ranks of the pipeline axis, through which micro-batches pass.

    Raises ConfigError for values that no pipeline can have.
    """

    plan: str = FITTED
    """Order of each rank's work: fitted to what the first steps measured, or gpipe, 1f1b, v-half, interleaved,
    looped-bfs, interleaved-zb, zbv or dualpipe-v."""
    chunks: int | None = None
    """Chunks of layers on each rank; by default the fewest that the plan takes."""
    in_flight: int | None = None
    """Most micro-batches that a rank of a fitted plan has begun but not finished; by default twice the stages."""
    forward: str = "int8/64:nearest"
    """Codec of hidden states at borders; fp32: as they are."""
    backward: str = "int4/64"
    """Codec of the gradients of hidden states at borders; fp32: as they are."""
    delta: bool = False
    """Round the difference to the state that crossed when the same sequence came last, instead of the state itself. The
    error shrinks as sequences return."""
    delta_mb: int = 256
    """Megabytes that a rank may keep for delta at each of its borders; the first sequences are kept."""
    layers: str = ""
    """Number of layers of each chunk, such as 5,6,6,3; by default such that the slowest chunk has least to compute."""
    head: Literal["last", "first", "spread"] = "last"
    """Which stages have the head: the last; the first, to which micro-batches then return (only fitted plans).

    Or all, with
    some of the vocabulary's rows of head and embedding each (plans fitted, 1f1b and v-half)."""
    barriers: Literal[1, 2] = 1
    """With head spread: how often all stages wait for each other between a micro-batch's last forward and its first
    backward. With 1 the gradient is the difference of two products; with 2 it is one product, and one more micro-batch
    is in flight."""
    skip: float = 0.0
    """Share of the stages that each micro-batch leaves out, such as 0.33, by SkipPipe (fitted plans, head 'first')."""
    recompute: Literal["never", "except-last", "always", "auto"] = "never"
    """Which activations are computed again instead of kept; auto: the fastest choice, by simulation, of those that fit
    into the memory that is free at the start."""
    recover: Literal["none", "average", "swap", "uniform", "copy", "random"] = "none"
    """Weights of a lost stage's layers, in a run that continues without a checkpoint: average: of the layers before and
    after, weighted by their gradients; swap: the same, but half of the micro-batches pass the first two and the last
    two stages in the other order, so that these can replace each other; uniform: the plain mean; copy: the layers
    before; random: new ones."""

    across: Literal["auto", "stages", "replicas"] = "auto"
    """Which dimension crosses nodes that have several ranks: stages, so that replicas of a stage are neighbours, or
    replicas, so that the stages of a pipeline are; auto: in a run that with fewer predicted seconds, else stages."""

    def __post_init__(self) -> None:
        problems = Problems()
        with problems.collect():
            check_types(self)
            known = [FITTED, *ORDERS]
            if self.plan not in known:
                raise ConfigError(f"plan {self.plan!r} is unknown{nearest(self.plan, known)}")
            allowed = FITTED_CHUNKS if self.plan == FITTED else ORDERS[self.plan][0]
            if self.chunks is not None and self.chunks not in allowed:
                near = min(max(self.chunks, allowed.start), allowed.stop - 1)
                raise ConfigError(f"chunks {self.chunks}: plan {self.plan!r} takes others; nearest: {near}")
        forward, _ = (problems.note(codec_of, self, direction) for direction in ("forward", "backward"))
        if self.delta and forward is not None and forward.traits.lossless:
            problems.messages.append(
                "delta: nothing is rounded forward; nearest: forward 'int8/64:nearest', or no delta"
            )
        if self.delta_mb < 1:
            problems.messages.append(f"delta_mb {self.delta_mb}: must be at least 1; nearest: 1")
        if self.in_flight is not None and (self.plan != FITTED or self.in_flight < 1):
            own = f"plan {self.plan!r} has its own; nearest: 'fitted'"
            why = "must be at least 1; nearest: 1" if self.plan == FITTED else own
            problems.messages.append(f"in_flight {self.in_flight}: {why}")
        if self.head == "first" and self.plan != FITTED:
            problems.messages.append(
                f"head 'first': micro-batches of plan {self.plan!r} do not come back to the first stage; nearest: plan "
                f"{FITTED!r}, or head 'last'"
            )
        if self.head == SPREAD and self.plan not in (FITTED, *SPREAD_ORDERS):
            those = ", ".join((FITTED, *SPREAD_ORDERS))
            problems.messages.append(
                f"head {SPREAD!r}: plan {self.plan!r} has no place for its passes; nearest: plan 1f1b, of {those}"
            )
        if self.head == SPREAD and self.delta:
            problems.messages.append(
                f"head {SPREAD!r} and delta: what goes to all stages has no last message; nearest: no delta"
            )
        if self.head == SPREAD and self.recover in RECOVERIES and self.recover != NONE:
            problems.messages.append(
                f"head {SPREAD!r} with recover {self.recover!r}: a lost stage's rows are on no other; nearest: head "
                f"'last', or recover {NONE!r}"
            )
        if self.head != SPREAD and self.barriers != 1:
            problems.messages.append(
                f"barriers {self.barriers}: head {self.head!r} has none; nearest: head {SPREAD!r}, or leave it out"
            )
        if self.skip and (self.head != "first" or self.num_chunks(1) > 1):
            problems.messages.append(
                f"skip {self.skip:g}: micro-batches come back to the first stage, and each rank has one chunk; "
                "nearest: plan 'fitted', 1 chunk, head 'first'"
            )
        if self.skip and self.delta:
            problems.messages.append(
                "skip and delta: a sequence does not cross the same borders each time; nearest: no delta"
            )
        if self.recover not in RECOVERIES:
            problems.messages.append(f"recover {self.recover!r} is unknown{nearest(self.recover, RECOVERIES)}")
        elif self.recover != NONE and self.num_chunks(1) > 1:
            problems.messages.append(
                f"recover {self.recover!r}: the neighbours of a lost chunk must be on other ranks, and plan "
                f"{self.plan!r} has {self.num_chunks(1)} chunks on each; nearest: plan {FITTED!r} with 1"
            )
        if self.recover == SWAP and (self.plan != FITTED or self.head == "first" or self.skip or self.delta):
            problems.messages.append(
                f"recover {SWAP!r} has paths of its own: no plan but {FITTED!r}, no skip, no delta, the head on the "
                "last stage; nearest: recover 'average'"
            )
        if self.recover != NONE and self.across == REPLICAS:
            problems.messages.append(
                f"recover {self.recover!r} with across {REPLICAS!r}: not supported; nearest: across {STAGES!r}"
            )
        if self.recompute not in (*MODES, AUTO):
            problems.messages.append(
                f"recompute {self.recompute!r} is unknown{nearest(self.recompute, [*MODES, AUTO])}"
            )
        problems.raise_any()

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs whose kernels are compiled before the workers start."""
        found = (self.crossing(0).codec(direction) for direction in ("forward", "backward"))
        return tuple(codec for codec in found if codec is not None)

    @property
    def is_measured(self) -> bool:
        """Whether the plan is made for measured stages and links."""
        return self.plan == FITTED and self.recover != SWAP

    def crossing(self, seed: int) -> Crossing:
        """The codecs at borders."""
        return Crossing(self.forward, self.backward, seed)

    def num_chunks(self, stages: int) -> int:
        """Number of chunks with layers."""
        fewest = 1 if self.plan == FITTED else ORDERS[self.plan][0].start
        return stages * (self.chunks or fewest)

    def home(self, stages: int) -> tuple[int, ...]:
        """The rank of each chunk."""
        if self.plan != FITTED:
            # A number of micro-batches that every order takes.
            return plan(self.plan, stages, 2 * self.num_chunks(stages), self.chunks).home
        home = tuple(chunk % stages for chunk in range(self.num_chunks(stages)))
        if self.recover == SWAP:
            return (0, *home, home[-1])
        return (*home, 0) if self.head == "first" else home

    def sizes(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Number of layers of each chunk, including embedding and head that are chunks of their own.

        layers: of the others.
        """
        if self.recover == SWAP:
            return (0, *layers, 0)
        return (*layers, 0) if self.head == "first" else tuple(layers)

    def last_messages_bytes(self, stages: int) -> list[float]:
        """For each stage, the most bytes of sequences' last messages, to which `delta` sends differences."""
        crossing = [ends for ends in pairwise(self.home(stages)) if ends[0] != ends[1]] if self.delta else []
        return [1e6 * self.delta_mb * sum(stage in ends for ends in crossing) for stage in range(stages)]

    def plan_of(
        self, stages: int, micro_batches: int, costs: Costs | None = None, network: Network | None = None,
        memory: Sequence[float] | None = None,
    ) -> Plan:  # fmt: skip
        """The plan of a step.

        Args:
            costs, network: the measurements for a fitted plan; None: all chunks alike.
            memory: bytes for the activations of each stage, by which recompute "auto" is decided; None: no limit.

        Raises ConfigError for a number of micro-batches that the plan does not support.
        """
        if self.skip:
            made = skipping(stages, micro_batches, self.skip, costs, network, self.in_flight)
        elif self.recover == SWAP:
            made = swapping(stages, micro_batches, self.in_flight)
        elif self.head == SPREAD:
            made = self._spread(stages, micro_batches, costs, network)
        elif self.plan == FITTED:
            home = self.home(stages)
            paths = straight(len(home), micro_batches)
            made = fitted(home, paths, costs or Costs.even(len(home)), network, in_flight=self.in_flight)
        else:
            made = plan(self.plan, stages, micro_batches, self.chunks)
        if self.recompute == AUTO:
            made = fastest_within(made, costs or Costs.even(len(made.home)), network, memory)
        else:
            made = recompute(made, self.recompute)
        check(made)
        return made

    def _spread(self, stages: int, micro_batches: int, costs: Costs | None, network: Network | None) -> Plan:
        """The plan with the passes of a spread head. If fitted: the faster of list scheduling and 1f1b."""
        if self.plan != FITTED:
            return SPREAD_ORDERS[self.plan](stages, micro_batches, self.barriers)
        home = self.home(stages)
        known, given = SPREAD_ORDERS["1f1b"](stages, micro_batches, self.barriers), costs or Costs.even(len(home))
        held = self.in_flight if self.in_flight is not None else 2 * stages
        found = [known] if known.home == home and max(in_flight(known)) <= held else []
        paths = straight(len(home), micro_batches)
        found.append(fitted(home, paths, given, network, in_flight=self.in_flight, barriers=self.barriers))
        return min(found, key=lambda made: simulate(made, given, network).makespan_s)

    def describe(self, sizes: Sequence[int], features: int, itemsize: int) -> list[Row]:
        """Rows of (asked for, in effect, why); sizes: layers of each chunk; itemsize: bytes of an exact element."""
        crossing, per_token = self.crossing(0), []
        for direction in ("forward", "backward"):
            codec = crossing.codec(direction)
            num_bytes = features * itemsize if codec is None else codec.packet_bytes(features)
            per_token.append(f"{direction} {getattr(self, direction)}, {num_bytes:,} bytes a token")
        with_head = {
            "last": "the last stage", "first": "the first stage, to which micro-batches come back",
            SPREAD: f"all stages, some rows on each, like the embedding; barriers: {self.barriers}",
        }[self.head]  # fmt: skip
        why = "fitted to what the second step measures, and anew when links drift" if self.is_measured else ""
        rows: list[Row] = [
            ("pipeline plan", self.plan, why),
            (
                f"layers {self.layers or 'by operations'}",
                ", ".join(map(str, filter(None, sizes))),
                f"the head is on {with_head}",
            ),
            ("borders", "; ".join(per_token), f"a token's hidden state has {features} features"),
        ]
        if self.skip:
            stages = sum(size > 0 for size in sizes)
            visited = f"{path_length(stages, self.skip)} of {stages} stages for each micro-batch"
            rows.append((f"skip {self.skip:g}", visited, "planned for equal stages and links until these are measured"))
        if self.delta:
            effect = f"to each sequence's last message, in at most {self.delta_mb} MB of memory for a border and side"
            rows.append(("differences forward", effect, "the first sequences are kept; others cross whole"))
        # What `auto` chooses is known with the first micro-batches.
        stated = self.recompute not in ("never", AUTO)
        return rows + ([("recompute", self.recompute, MODES[self.recompute])] if stated else [])


def check_stages(
    options: Pipeline, stages: int, num_layers: int | None = None, micro_batches: int | None = None,
    more_layers: str = "", features: int | None = None, num_ranks: int | None = None,
) -> None:  # fmt: skip
    """Raise ConfigError, with all reasons, for stages, layers, micro-batches and codecs that don't fit each other.

    more_layers: the flag that sets the model's number of layers; empty: there is none. features: of a hidden state.
    num_ranks: that the stages share; None: a multiple of their number. Of stages that do not divide them, which is told
    elsewhere, layers are not counted.
    """
    problems = Problems()
    if features is not None:
        problems.note(options.crossing(0).check, features)
    chunks = options.num_chunks(stages)
    is_filled = not (num_ranks or stages) % stages
    if is_filled and num_layers is not None and chunks > num_layers:
        each = f", {chunks // stages} chunk(s) on each" if chunks > stages else ""
        # Ranks that so many stages fill are also filled by any divisor of that number.
        able = [n for n in range(1, stages) if stages % n == 0 and options.num_chunks(n) <= num_layers]
        or_more = f", or {more_layers} {chunks}" if more_layers else ""
        problems.messages.append(
            f"{stages} stages{each}: the model has {num_layers} layers, and each stage needs its own; nearest divisor "
            f"of {stages} that works: {max(able, default=1)}{or_more}"
        )
    elif is_filled and num_layers is not None and options.layers:
        problems.note(stated_sizes, options.layers, chunks, num_layers)
    problems.note(check_recovery, options.recover, stages)
    if options.skip:
        problems.note(path_length, stages, options.skip)
    if micro_batches is not None:
        problems.note(options.plan_of, stages, micro_batches)
    problems.raise_any()
