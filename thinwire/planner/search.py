"""Finds the fastest candidate that fits, by simulated steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

from torch import nn

from thinwire.errors import ConfigError
from thinwire.methods.interface import MethodPlan
from thinwire.models import Llama
from thinwire.planner.candidates import Candidate
from thinwire.planner.cut import cut_model
from thinwire.planner.memory import Recorded
from thinwire.planner.stages import Grid, stages_of
from thinwire.planner.twins import Twins

# Raises ConfigError for a method that can't train so.
TwinsOf = Callable[[Candidate], Twins]
# What a candidate's method holds and sends on one rank of a part of the model.
PlanOf = Callable[[Candidate, nn.Module], MethodPlan]


@dataclass(frozen=True)
class Priced:
    """The costs of one candidate.

    Attributes:
        step_s: seconds of a step.
        memory_bytes: of the fullest stage, activations included.
        link_s: of the busiest node's link alone, at most step_s: a burst may pass faster than the link's rate.
        order: the rank in each place; empty: unchanged.
        terms: parts of a step of the first rank, by the names of a run's metrics.
        counted: what its memory follows from.
        steps: until a target loss, divided by those of exact training.
    """

    candidate: Candidate
    step_s: float
    bubble: float
    memory_bytes: float
    link_s: float
    order: tuple[int, ...] = ()
    terms: Mapping[str, float] = field(default_factory=dict)
    counted: Recorded | None = None
    steps: float = 1.0

    @property
    def score(self) -> float:
        """What the search makes small: seconds a step, times the steps until a target loss."""
        return self.step_s * self.steps


@dataclass(frozen=True)
class Search:
    """All candidates that were priced.

    Attributes:
        fastest: those that fit, fastest first; equally fast ones in the order of `candidates`.
        too_large: those that don't fit, smallest first.
        refused: candidates that can't run, by reason.
        aside: candidates that fit, but are not to be chosen, by reason, fastest first.
    """

    fastest: tuple[Priced, ...]
    too_large: tuple[Priced, ...]
    refused: dict[str, list[Candidate]]
    aside: dict[str, list[Priced]] = field(default_factory=dict)

    @property
    def fastest_of_cuts(self) -> list[tuple[str, Priced]]:
        """The fastest of each number of ranks on the axes but data, fastest first, and what to call these."""
        found: dict[str, Priced] = {}
        for priced in self.fastest:
            way = priced.candidate
            axes = {"tensor": way.tensor, "sequence": way.sequence, "expert": way.experts}
            more = "".join(f" x {size} {axis} ranks" for axis, size in axes.items() if size > 1)
            more += f" in each of {way.islands} islands" if way.outer else ""
            more += f" in groups of {way.group} rank(s)" if way.group else ""
            found.setdefault(f"{way.stages} stage(s){more}", priced)
        return list(found.items())


def search(
    model: Llama, found: Iterable[Candidate], on: TwinsOf, plan_of: PlanOf, grid: Grid, seq_len: int,
    memory_bytes: float | None = None, loss: str = "auto",
) -> Search:  # fmt: skip
    """Price candidates for stated links, and rank those whose fullest stage fits a rank's memory.

    One pipeline is simulated, and beside it another, which stands for all others. A candidate that recomputes, or
    leaves a part on a disk, is priced only if the same one without that does not fit. model: without memory.
    """

    @cache
    def cut(tensor: int) -> Llama:
        return cut_model(model, tensor)

    def priced(way: Candidate) -> Priced:
        return price(cut(way.tensor), way, on(way), partial(plan_of, way), grid, seq_len, loss)

    return ranked(found, priced, memory_bytes)


def as_kept(way: Candidate) -> Candidate:
    """The same candidate, with all activations kept, and all of it in memory."""
    return replace(way, pipeline=replace(way.pipeline, recompute="never"), memory="", held=())


def ranked(
    found: Iterable[Candidate], price_of: Callable[[Candidate], Priced], memory_bytes: float | None = None,
    why_not: Callable[[Candidate], str] = lambda way: way.not_yet,
) -> Search:  # fmt: skip
    """Price candidates with any function, and rank those that fit; see `search`.

    why_not: why a candidate is not to be chosen, whatever it costs; empty: it may be.
    """
    fits: list[Priced] = []
    too_large: list[Priced] = []
    aside: dict[str, list[Priced]] = {}
    refused: dict[str, list[Candidate]] = {}
    fitting: set[Candidate] = set()
    for candidate in found:
        if as_kept(candidate) in fitting:
            continue
        try:
            priced = price_of(candidate)
        except ConfigError as error:
            refused.setdefault(str(error), []).append(candidate)
            continue
        if memory_bytes is not None and priced.memory_bytes > memory_bytes:
            # The least memory that would do is that of a way that can be chosen.
            too_large += [] if why_not(candidate) else [priced]
            continue
        fitting.add(as_kept(candidate))
        if reason := why_not(candidate):
            aside.setdefault(reason, []).append(priced)
        else:
            fits.append(priced)
    for ways in (fits, *aside.values()):
        ways.sort(key=lambda priced: priced.score)
    return Search(tuple(fits), tuple(sorted(too_large, key=lambda priced: priced.memory_bytes)), refused, aside)


def price(
    model: Llama, way: Candidate, own: Twins, plan_of: Callable[[nn.Module], MethodPlan], grid: Grid, seq_len: int,
    loss: str,
) -> Priced:  # fmt: skip
    """The costs of one candidate for stated links. model: its shapes on a rank of the tensor axis."""
    is_joined = way.stages > 1 and way.replicas > 1
    stages = stages_of(
        model, way.pipeline, way.stages, way.num_micro_batches, way.micro_batch, seq_len, grid, loss, way.tensor,
        join=partial(own.join, grid) if is_joined else None,
    )  # fmt: skip
    step_s, bubble = stages.step_s, stages.bubble
    if way.stages == 1 and way.replicas > 1:
        alone_s = step_s
        step_s = own.step_s(model, grid, alone_s / way.num_micro_batches / 3, way.num_micro_batches)
        bubble = 1 - alone_s / step_s
    plans = {stage: plan_of(stages.parts[stage]) for stage in stages.heaviest}
    memory = max(stages.memory_bytes(stage, plan) for stage, plan in plans.items())
    borders_s = stages.crossing_bytes(grid) / (grid.rate or math.inf)
    on_link_s = borders_s + max(link_s(plan, grid) for plan in plans.values())
    return Priced(way, step_s, bubble, memory, min(on_link_s, step_s))


def link_s(plan: MethodPlan, grid: Grid) -> float:
    """Seconds of a method's messages on one node's link, or inside a node if that takes longer."""
    sent = grid.local_size * plan.sent_on("inter") if plan.crossing is None else plan.crossing
    inside = plan.sent_on("intra") + plan.sent_on("pair")
    return max(sent / (grid.rate or float("inf")), inside / (grid.local_rate or float("inf")))
