"""The memory of a process from what formulas count: a factor and an offset, or a network trained on recorded runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.models.llama import LlamaConfig
from thinwire.planner.candidates import Candidate

# What a process takes for each byte that formulas count: packets, temporary tensors, what the allocator keeps. Peaks of
# the demo model on a CPU were 1.43 and 1.50 times the formulas', in a pipeline and without.
SCRATCH = 1.5
# Inputs, widths and steps of the network; with fewer runs than LEAST it is not trained.
WIDTHS, STEPS, RATE, LEAST = (11, 64, 48, 24, 12, 1), 800, 1e-2, 24
# One run in so many is held out.
HELD_OUT = 4


@dataclass(frozen=True)
class Recorded:
    """A run that has ended. features: see `features_of`. base_bytes: of a process before it has a model."""

    features: tuple[float, ...]
    counted_bytes: float
    base_bytes: float
    peak_bytes: float = 0.0


class Estimator(Protocol):
    """The peak memory of a process, in bytes."""

    def peak_bytes(self, run: Recorded) -> float: ...


@dataclass(frozen=True)
class Offset:
    """base + factor * counted + more."""

    factor: float = SCRATCH
    more: float = 0.0

    def peak_bytes(self, run: Recorded) -> float:
        """See the class."""
        return run.base_bytes + self.factor * run.counted_bytes + self.more

    @classmethod
    def fitted(cls, runs: Sequence[Recorded]) -> Offset:
        """The factor and the offset with the least squares of relative errors; the offset is 0 for equal counts."""
        counted = np.array([run.counted_bytes for run in runs])
        weights = 1 / np.array([run.peak_bytes for run in runs])
        grown = np.array([run.peak_bytes - run.base_bytes for run in runs])
        if counted.max() < 1.05 * counted.min():
            return cls(float(np.sum(weights**2 * grown * counted) / np.sum((weights * counted) ** 2)))
        rows = np.stack([counted, np.ones_like(counted)], 1) * weights[:, None]
        factor, more = np.linalg.lstsq(rows, grown * weights, rcond=None)[0]
        return cls(float(factor), float(more))


class Perceptron:
    """11 features -> 64 -> 48 -> 24 -> 12 -> 1 with ReLU, in logarithms, standardised, trained by Adam.

    Pipette's learning rate of 0.1 depends on the seed; here it falls from 0.01 along a cosine.
    Source: "Pipette" (DATE 2024), section V.
    """

    def __init__(self, runs: Sequence[Recorded], seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parts: list[nn.Module] = []
            for inputs, outputs in pairwise(WIDTHS):
                parts += [nn.Linear(inputs, outputs), nn.ReLU()]
            self._network = nn.Sequential(*parts[:-1])
        x = self._logs(runs)
        y = torch.tensor([[run.peak_bytes] for run in runs]).log()
        self._of_x, self._of_y = ((each.mean(0), each.std(0) + 1e-6) for each in (x, y))
        (mean, deviation), target = self._of_x, (y - self._of_y[0]) / self._of_y[1]
        optimizer = torch.optim.Adam(self._network.parameters(), lr=RATE)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (self._network((x - mean) / deviation) - target).square().mean().backward()
            optimizer.step()
            scheduler.step()

    def peak_bytes(self, run: Recorded) -> float:
        """The network's output."""
        (mean, deviation), (mean_y, deviation_y) = self._of_x, self._of_y
        with torch.no_grad():
            found = self._network((self._logs([run]) - mean) / deviation) * deviation_y + mean_y
        return float(found.exp())

    @staticmethod
    def _logs(runs: Sequence[Recorded]) -> Tensor:
        return torch.tensor([run.features for run in runs]).log()


def features_of(config: LlamaConfig, way: Candidate) -> tuple[float, ...]:
    """The inputs of the network.

    Ranks, layers, width, heads, tensor ranks, stages, replicas, layers of a stage, sequences of a micro-batch, of a
    step, and of a replica's step. Ranks that share a sequence share its tokens.
    """
    each = way.num_micro_batches * way.micro_batch
    layers = config.num_hidden_layers
    return (
        way.num_ranks, layers, config.hidden_size, config.num_attention_heads, way.tensor,
        way.stages, way.sharing, layers / way.stages, way.micro_batch / way.sequence, each * way.replicas, each,
    )  # fmt: skip


def fitted(runs: Sequence[Recorded]) -> tuple[Estimator, str]:
    """The estimator with the smaller mean relative error on held-out runs, fitted to all of them; and why.

    Held out are those of most ranks, because plans ask for more than what was run.
    """
    ordered = sorted(runs, key=lambda run: run.features[0])
    num = len(ordered) // HELD_OUT
    known, held = ordered[: len(ordered) - num], ordered[len(ordered) - num :]
    if len(runs) < LEAST:
        why = f"a factor and an offset, fitted to {len(runs)} runs; a network is trained from {LEAST} on"
        return Offset.fitted(runs), why
    kinds: dict[str, Callable[[Sequence[Recorded]], Estimator]]
    kinds = {"a factor and an offset": Offset.fitted, "a network": Perceptron}
    errors = {name: error_of(kind(known), held) for name, kind in kinds.items()}
    best = min(errors, key=errors.__getitem__)
    shown = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
    why = f"{best}, fitted to {len(runs)} runs; error on the {num} with most ranks, held out: {shown}"
    return kinds[best](runs), why


def error_of(estimator: Estimator, runs: Sequence[Recorded]) -> float:
    """Mean relative error."""
    return fmean(abs(estimator.peak_bytes(run) / run.peak_bytes - 1) for run in runs)


def figure_of(on_gpu: bool) -> str:
    """The name of a run's figure that a plan's memory is compared with: of a process, or of its tensors on a GPU."""
    return "peak_allocated_bytes" if on_gpu else "peak_rss_bytes"


def read_runs(folder: str | Path, *, on_gpu: bool = False) -> list[Recorded]:
    """The runs under plans in a folder and below it, on GPUs or on the CPU. Raises ConfigError if there is none.

    The peak of a run on GPUs is that of its tensors there.
    """
    found, figure = [], figure_of(on_gpu)
    for path in sorted(Path(folder).rglob("summary.json")):
        try:
            summary = json.loads(path.read_text())
            if (summary.get("device", "cpu") != "cpu") != on_gpu:
                continue
            peak = float(summary[figure])
            told = json.loads((path.parent / "plan.json").read_text())["memory"]
            run = Recorded(tuple(map(float, told["features"])), told["counted_bytes"], told["base_bytes"], peak)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # A run without a plan, or of an earlier version.
            continue
        if len(run.features) == WIDTHS[0] and min(*run.features, run.counted_bytes, peak) > 0:
            found.append(run)
    if not found:
        where = "GPUs" if on_gpu else "the CPU"
        raise ConfigError(f"--runs {folder}: holds no finished run on {where} that followed a plan; leave --runs out")
    return found
