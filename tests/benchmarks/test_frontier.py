"""What the frontier's benchmark makes of finished runs: rates, means paired by seed, minutes, tables."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

# It takes its runs from neighbours.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
SPEC = importlib.util.spec_from_file_location("frontier", Path(__file__).parents[2] / "benchmarks/frontier.py")
assert SPEC is not None and SPEC.loader is not None
frontier: Any = importlib.util.module_from_spec(SPEC)
sys.modules["frontier"] = frontier
SPEC.loader.exec_module(frontier)


def lines(name: str, steps: int, losses: dict[int, float | None], sent: int = 100) -> list[dict[str, Any]]:
    """Finished runs of a method at 0.001, by seed, and those that chose this rate of the grid."""
    text = {"model": "tiny", "method": name, "text": frontier.METHODS[name], "compute_s": 0.5}
    part = frontier.TUNING_PART if steps >= frontier.LEAST_STEPS else 1
    tuning: dict[str, Any] = {"steps": steps // part, "seed": frontier.TUNING_SEED, "curve": []}
    found = [text | tuning | {"lr": lr, "heldout_loss": 2.0 + abs(lr - 0.001)} for lr in frontier.GRID]
    found[-1]["heldout_loss"] = None
    found[-2]["heldout_loss"] = math.nan
    curve = [(steps // 2, 3.0, sent // 2), (steps, 2.0, sent)]
    own = {"steps": steps, "lr": 0.001, "curve": curve}
    return found + [text | own | {"seed": seed, "heldout_loss": loss} for seed, loss in losses.items()]


def runs_of(tmp_path: Path, *parts: list[dict[str, Any]]) -> Any:
    path = tmp_path / "frontier.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for part in parts for line in part))
    return frontier.Runs(path, math.inf)


def test_the_rate_is_that_of_the_lowest_loss_and_a_run_that_diverged_is_the_worst(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, lines("zero", 5000, {0: 2.0}))
    config = frontier.configs("tiny", 5000, ["zero"])["zero"]
    assert frontier.tuned_lr("zero", config, runs, is_asked=False) == 0.001
    runs.found = {key: line for key, line in runs.found.items() if line["lr"] != 0.03}
    assert frontier.tuned_lr("zero", config, runs, is_asked=False) is None


def test_methods_with_other_seeds_are_compared_by_their_gap_to_the_exact_run(tmp_path: Path) -> None:
    """Seed 0 is an easy one: alone on it, a method of a higher loss than the exact one must not be on the frontier."""
    exact = lines("zero", 5000, {0: 1.0, 1: 3.0}, sent=100)
    alone, lost = lines("demo", 5000, {0: 1.1}, sent=100), lines("dion", 5000, {0: 1.0, 1: None}, sent=50)
    runs = runs_of(tmp_path, exact, alone, lost)
    first, demo = frontier.points("tiny", 5000, runs)
    assert (first["loss"], demo["loss"], demo["seeds"]) == (2.0, 1.1, 1) and demo["gap"] == pytest.approx(0.1)
    assert first["near"] == {"steps": 5000, "compute_s": 2500.0, "sent_bytes": 100} and demo["near"]["steps"] == 5000
    zero, other = frontier.recorded_outcomes([first, demo])
    assert (zero.loss, zero.error) == (2.0, 0.0) and other.loss == pytest.approx(2.2)
    assert frontier.beaten([zero, other]) == {"demo"}
    assert frontier.diverged("tiny", 5000, runs) == ["dion"]
    assert [line.split(" | ")[0] for line in frontier.table([first, demo])][2:] == ["| **zero**", "| demo (beaten)"]


def test_each_length_of_two_methods_and_more_has_its_table(tmp_path: Path) -> None:
    names = list(frontier.METHODS)[:3]
    wide = [line for name in names for line in lines(name, 50, {0: 2.0})]
    parts = lines("zero", 5000, {0: 2.0}), lines(names[1], 5000, {0: 2.1}), wide, lines("zero", 70, {0: 2.0})
    assert [len(found) for found in frontier.tables("tiny", runs_of(tmp_path, *parts))] == [2, 3]


def test_a_step_takes_the_least_of_a_methods_processor_times(tmp_path: Path) -> None:
    exact, demo = lines("zero", 5000, {0: 2.0, 1: 2.0}), lines("demo", 5000, {0: 2.0})
    exact[-1]["compute_s"], exact[0]["compute_s"], demo[0]["compute_s"] = 0.7, 0.4, 0.1
    first, _ = frontier.points("tiny", 5000, runs_of(tmp_path, exact, demo))
    assert first["near"]["compute_s"] == pytest.approx(5000 * 0.4)


def test_near_is_the_first_point_at_the_target() -> None:
    run = {"curve": [(10, 3.0, 1000), (20, 2.0, 2000), (30, 1.0, 3000)]}
    near = frontier.point_near(run, 2.5, 1.0)
    assert near == {"steps": 20, "compute_s": 20.0, "sent_bytes": 2000}
    assert frontier.minutes_near({"near": near}, 8000.0) == (20 * 1.0 + 2.0) / 60
    assert frontier.point_near(run, 0.5, 1.0) is None and frontier.minutes_near({"near": None}, 8000.0) is None
