"""What was measured of some ways to train corrects what is predicted of the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.planner.candidates import Candidate
from thinwire.planner.search import Priced

# A way that did not run to its end, for want of memory above all, counts as this many times its prediction.
PENALTY = 3.0
# Standard deviations, in logarithms of seconds: of all predictions together, of one value of a knob, of a measurement,
# and of what a failure stands for, which says less of each knob.
COMMON, OF_VALUE, NOISE, OF_FAILURE = 1.0, 0.3, 0.05, 0.5


@dataclass(frozen=True)
class Trial:
    """A way to train that was measured. step_s: seconds of a step; infinite: it did not run."""

    way: Priced
    step_s: float


def knobs_of(way: Candidate) -> dict[str, str]:
    """What may be turned, and where it stands in a candidate."""
    strategy = way.method if max(way.sharing, way.islands) > 1 else ""
    found = {"strategy": strategy, "stages": way.stages, "tensor": way.tensor, "local-size": way.group}
    found |= {"sequence": way.sequence, "memory": way.memory, "experts": way.experts, "islands": way.islands}
    found |= {"micro-batch": way.micro_batch, "borders": way.borders, "plan": "", "recompute": ""}
    if way.stages > 1:
        found |= {"plan": way.pipeline.plan, "recompute": way.pipeline.recompute}
    return {name: str(value) for name, value in found.items()}


def seconds_of(trials: Sequence[Trial]) -> list[float]:
    """Seconds of each trial; of those that did not run PENALTY times what was predicted."""
    return [trial.step_s if math.isfinite(trial.step_s) else PENALTY * trial.way.step_s for trial in trials]


class Surrogate:
    """A sum of one number for each knob's value, fitted to a number of each trial.

    y = w_0 + sum_k w_k(value of knob k) + e with w_0 ~ N(0, COMMON^2), w_k ~ N(0, OF_VALUE^2), and e ~ N(0, NOISE^2),
    or N(0, OF_FAILURE^2) of a way that did not run: the mean of w given y is Bayesian linear regression's.
    """

    def __init__(self, ways: Iterable[Priced], trials: Sequence[Trial], values: Sequence[float]) -> None:
        """ways: all whose knobs may be asked for. values: of the trials."""
        known = dict.fromkeys(pair for way in ways for pair in knobs_of(way.candidate).items())
        self._place = {pair: number for number, pair in enumerate(known, 1)}
        prior = np.full(len(known) + 1, OF_VALUE**-2)
        prior[0] = COMMON**-2
        x = np.array([self._row(knobs_of(trial.way.candidate)) for trial in trials]).reshape(len(trials), len(prior))
        precision = [(NOISE if math.isfinite(trial.step_s) else OF_FAILURE) ** -2 for trial in trials]
        self._covariance = np.linalg.inv(np.diag(prior) + (x.T * precision) @ x)
        self._weights = self._covariance @ (x.T * precision) @ np.asarray(values)

    def _row(self, knobs: dict[str, str]) -> np.ndarray:
        row = np.zeros(len(self._place) + 1)
        row[[0, *(self._place[pair] for pair in knobs.items())]] = 1.0
        return row

    def at(self, knobs: dict[str, str]) -> tuple[float, float]:
        """The expected number, and its standard deviation."""
        row = self._row(knobs)
        return float(row @ self._weights), math.sqrt(row @ self._covariance @ row)


def corrected(ways: Sequence[Priced], trials: Sequence[Trial]) -> list[tuple[Priced, float, float]]:
    """(way, seconds, factor) of those that were not tried, most promising first.

    Seconds are predicted ones times what measured ones of its like exceed them by; within that factor they may be less.
    Where the seconds until a target loss count, these decide what is promising.
    """
    tried = {trial.way.candidate for trial in trials}
    ratios = [math.log(s / trial.way.step_s) for trial, s in zip(trials, seconds_of(trials), strict=True)]
    told = Surrogate(ways, trials, ratios)
    found = []
    for way in ways:
        if way.candidate not in tried:
            mean, deviation = told.at(knobs_of(way.candidate))
            found.append((way, way.step_s * math.exp(mean), math.exp(deviation)))
    return sorted(found, key=lambda each: each[0].steps * each[1] / each[2])


def next_ways(ways: Sequence[Priced], trials: Sequence[Trial], num: int) -> list[Priced]:
    """The ways to measure next: those that may be the fastest. Without trials the fastest predicted ones."""
    return [way for way, _, _ in corrected(ways, trials)[:num]]


def importance(trials: Sequence[Trial]) -> dict[str, float]:
    """Each knob's part of what all knobs explain of the measured seconds, the most important first.

    By permutation: how much worse a surrogate of the trials' seconds predicts them where a knob stands as in another
    trial; the mean over all rotations of the trials. Source: Breiman, "Random Forests" (2001), section 10.
    """
    values, knobs = list(map(math.log, seconds_of(trials))), [knobs_of(trial.way.candidate) for trial in trials]
    told = Surrogate([trial.way for trial in trials], trials, values)

    def error(rows: Sequence[dict[str, str]]) -> float:
        return float(np.mean([(told.at(row)[0] - value) ** 2 for row, value in zip(rows, values, strict=True)]))

    rises: dict[str, float] = {}
    for name in knobs[0]:
        turned = [
            [{**row, name: knobs[(at + by) % len(knobs)][name]} for at, row in enumerate(knobs)]
            for by in range(1, len(knobs))
        ]
        rises[name] = max(0.0, float(np.mean([error(rows) for rows in turned])) - error(knobs)) if turned else 0.0
    total = sum(rises.values()) or 1.0
    return {name: rise / total for name, rise in sorted(rises.items(), key=lambda pair: -pair[1])}
