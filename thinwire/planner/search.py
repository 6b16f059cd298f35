"""Finds the fastest candidate that fits, by simulated steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from thinwire.errors import ConfigError
from thinwire.methods.interface import MethodPlan
from thinwire.methods.pipeline.options import Pipeline
from thinwire.models import Llama
from thinwire.models.tensor import cut_skeleton
from thinwire.planner.candidates import Candidate
from thinwire.planner.memory import Recorded
from thinwire.planner.stages import Grid, Stages, stages_of

# (candidate, stage) -> what the method holds and sends on one rank of it.
PlanOf = Callable[[Candidate, Stages, int], MethodPlan]


@dataclass(frozen=True)
class Priced:
    """The costs of one candidate.

    Attributes:
        step_s: seconds of a step; in a search for stated links, the replicas' messages are not hidden.
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
            found.setdefault(f"{way.stages} stage(s){more}", priced)
        return list(found.items())


def search(
    model: Llama, found: Iterable[Candidate], planned: PlanOf, grid: Grid, seq_len: int,
    memory_bytes: float | None = None, loss: str = "auto",
) -> Search:  # fmt: skip
    """Price candidates, and rank those whose fullest stage fits a rank's memory. The model has no memory.

    A candidate that recomputes, or leaves a part on a disk, is priced only if the same one without that does not fit.
    """

    @cache
    def cut(tensor: int) -> Llama:
        if tensor == 1:
            return model
        own = copy.deepcopy(model)
        cut_skeleton(own, tensor)
        return own

    @cache
    def simulated(pipeline: Pipeline, stages: int, tensor: int, num: int, size: int) -> Stages:
        return stages_of(cut(tensor), pipeline, stages, num, size, seq_len, grid, loss, tensor)

    def priced(way: Candidate) -> Priced:
        sizes = way.stages, way.tensor, way.num_micro_batches, way.micro_batch
        return price(way, simulated(way.pipeline, *sizes), planned, grid)

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


def price(candidate: Candidate, stages: Stages, planned: PlanOf, grid: Grid) -> Priced:
    """The costs of one candidate whose pipeline was simulated."""
    plans = {stage: planned(candidate, stages, stage) for stage in stages.heaviest}
    memory = max(stages.memory_bytes(stage, plan) for stage, plan in plans.items())
    method_s = max(exchange_s(plan, grid) for plan in plans.values())
    borders_s = stages.crossing_bytes(grid) / (grid.rate or float("inf"))
    step_s = stages.step_s + method_s
    return Priced(candidate, step_s, stages.bubble, memory, min(borders_s + method_s, step_s))


def exchange_s(plan: MethodPlan, grid: Grid) -> float:
    """Seconds of a method's messages on one node's link, or inside a node if that takes longer."""
    sent = grid.local_size * plan.sent_on("inter") if plan.crossing is None else plan.crossing
    inside = plan.sent_on("intra") + plan.sent_on("pair")
    return max(sent / (grid.rate or float("inf")), inside / (grid.local_rate or float("inf")))
