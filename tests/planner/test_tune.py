"""The search that measures, on surfaces of which all is known, and the command around it."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from thinwire.methods.pipeline.options import Pipeline
from thinwire.planner.candidates import Candidate
from thinwire.planner.search import Priced
from thinwire.planner.tune import Trial, importance, knobs_of, next_ways

SEEDS, EVALUATIONS = range(10), 40
RECOMPUTE = {mode: Pipeline(plan="1f1b", recompute=mode) for mode in ("never", "except-last", "always")}


class Surface:
    """960 ways: what a simulation predicts of them, and what they really take, with holes that no formula knows.

    Each knob's value is off by a factor of its own, of standard deviation 0.25, and each way by one of 0.03.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.truth: dict[Candidate, float] = {}
        self.ways: list[Priced] = []
        off: dict[tuple[str, str], float] = {}
        strategies = ("zero", "sdp4bit", "ddp", "zero-bf16")
        for strategy, stages, tensor, size, mode in product(
            strategies, (2, 4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 4, 8), RECOMPUTE
        ):
            way = Candidate(strategy, stages, 2, size, 64 // size, RECOMPUTE[mode], tensor)
            # Work, a bubble, passes of small micro-batches, and sums of tensor ranks.
            predicted = (1 + (mode != "never") / 3) * (1 + stages * size / 64) * (1 + 0.4 / size) * (1 + 0.05 * tensor)
            # No way here has experts, islands, or groups.
            left_out = ("experts", "islands", "local-size")
            turned = [pair for pair in knobs_of(way).items() if pair[0] not in left_out]
            for pair in turned:
                off.setdefault(pair, 0.25 * float(torch.randn((), generator=generator)))
            error = sum(off[pair] for pair in turned)
            own = 0.03 * float(torch.randn((), generator=generator))
            fits = stages * tensor * (1 + (mode != "never")) >= 4 * size
            self.ways.append(Priced(way, predicted, 0.0, 0.0, 0.0))
            self.truth[way] = predicted * math.exp(error + own) if fits else math.inf
        self.best = min(self.truth.values())

    def tuned(self) -> list[Trial]:
        trials: list[Trial] = []
        while len(trials) < EVALUATIONS:
            trials += [Trial(way, self.truth[way.candidate]) for way in next_ways(self.ways, trials, 4)]
        return trials

    def regret(self, trials: list[Trial]) -> float:
        return min(trial.step_s for trial in trials) / self.best


def test_few_measurements_find_the_fastest_and_failures_become_rare() -> None:
    found, by_chance, failed = [], [], []
    for seed in SEEDS:
        surface = Surface(seed)
        assert len(surface.ways) == 960
        trials = surface.tuned()
        assert len({trial.way.candidate for trial in trials}) == EVALUATIONS
        found.append(surface.regret(trials))
        order = torch.randperm(960, generator=torch.Generator().manual_seed(seed))[:EVALUATIONS].tolist()
        chosen = [surface.ways[number] for number in order]
        by_chance.append(surface.regret([Trial(way, surface.truth[way.candidate]) for way in chosen]))
        failures = [math.isinf(trial.step_s) for trial in trials]
        failed.append((sum(failures[:20]), sum(failures[20:])))
    print(f"within 5%: {sum(r <= 1.05 for r in found)} of 10; by chance {sum(r <= 1.05 for r in by_chance)}; {failed}")
    assert sum(regret <= 1.05 for regret in found) >= 9
    assert sum(regret <= 1.05 for regret in by_chance) <= 3
    assert sum(late for _, late in failed) < sum(early for early, _ in failed)


def test_without_trials_the_fastest_predicted_ones_are_next() -> None:
    ways = Surface(0).ways
    fastest = sorted(ways, key=lambda way: way.step_s)[:3]
    assert {way.step_s for way in next_ways(ways, [], 3)} == {way.step_s for way in fastest}


@pytest.mark.parametrize("planted", ["micro-batch", "stages", "recompute"])
def test_the_knob_that_counts_most_is_told(planted: str) -> None:
    ways, trials = Surface(0).ways, []
    levels: dict[str, list[str]] = {}
    for name in knobs_of(ways[0].candidate):
        levels[name] = sorted({knobs_of(way.candidate)[name] for way in ways})
    for number in torch.randperm(960, generator=torch.Generator().manual_seed(1))[:EVALUATIONS].tolist():
        slower = 0.0
        for name, value in knobs_of(ways[number].candidate).items():
            slower += (2.0 if name == planted else 0.5) * levels[name].index(value) / len(levels[name])
        trials.append(Trial(ways[number], math.exp(slower)))
    found = importance(trials)
    assert next(iter(found)) == planted and found[planted] > 0.5
    assert sum(found.values()) == pytest.approx(1.0)
