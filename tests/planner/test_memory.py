"""Memory from recorded runs: of a formula with noise, held out on more ranks than were known."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

import pytest

from thinwire.errors import ConfigError
from thinwire.methods.pipeline.options import Pipeline
from thinwire.models.llama import PRESETS
from thinwire.planner.candidates import Candidate
from thinwire.planner.memory import Offset, Perceptron, Recorded, error_of, features_of, fitted, read_runs

BASE = 5e8


def runs(is_odd: bool, ranks: tuple[int, ...] = (4, 8, 16, 32)) -> list[Recorded]:
    """Runs whose counted bytes are right, or, if is_odd, lack the activations; with 5% of noise."""
    rng, found = random.Random(0), []
    for name, num, stages, tensor, size in product(("demo", "125m", "350m"), ranks, (1, 2, 4), (1, 2), (1, 2, 4)):
        config = PRESETS[name]
        replicas = num // stages // tensor
        if not replicas:
            continue
        way = Candidate("zero", stages, replicas, size, 8 // size, Pipeline(), tensor)
        weights = 16 * 12 * config.hidden_size**2 * config.num_hidden_layers / stages / tensor / replicas
        activations = 34 * size * 256 * config.hidden_size * config.num_hidden_layers / stages
        peak = (BASE + 1.4 * (weights + activations)) * (1 + 0.05 * rng.uniform(-1, 1))
        counted = weights + (0 if is_odd else activations)
        found.append(Recorded(features_of(config, way), counted, BASE, peak))
    return found


def test_the_better_of_both_is_taken_by_runs_that_are_held_out() -> None:
    for is_odd, kind in ((False, Offset), (True, Perceptron)):
        known, larger = runs(is_odd, (4, 8, 16)), runs(is_odd, (32,))
        found, why = fitted(known)
        assert isinstance(found, kind), why
        assert error_of(found, larger) <= 0.1, why
    few, why = fitted(runs(False)[:5])
    assert isinstance(few, Offset) and "fitted to 5 runs" in why
    alike = [Recorded((1.0,) * 11, 1e8, BASE, BASE + 2e8)] * 3
    assert Offset.fitted(alike).factor == pytest.approx(2.0) and not Offset.fitted(alike).more


def test_runs_are_read_from_their_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no finished run on the CPU that followed a plan"):
        read_runs(tmp_path)
    for number, told in enumerate(({"features": [1.0] * 11, "counted_bytes": 1e8, "base_bytes": BASE}, None)):
        folder = tmp_path / "runs" / str(number)
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text('{"peak_rss_bytes": 7e8}')
        (folder / "plan.json").write_text(json.dumps({"memory": told}))
    assert read_runs(tmp_path) == [Recorded((1.0,) * 11, 1e8, BASE, 7e8)]
    # On a GPU the peak is that of its tensors, and a run there says nothing about a process on the CPU.
    figures = {"device": "NVIDIA H100", "peak_rss_bytes": 9e9, "peak_allocated_bytes": 3e8}
    (tmp_path / "runs" / "0" / "summary.json").write_text(json.dumps(figures))
    assert [run.peak_bytes for run in read_runs(tmp_path, on_gpu=True)] == [3e8]
    with pytest.raises(ConfigError, match="on the CPU"):
        read_runs(tmp_path)
