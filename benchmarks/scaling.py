"""How a step's time grows with bytes over rate, and where compression stops paying on this machine.

    python benchmarks/scaling.py [--sweep rate nodes size] [--strategies ddp-bf16 sdp4bit] [--steps 10] [--json FILE]

Three sweeps around 4 nodes, 100 Mbit/s and the demo model, each point a race of `thinwire compare`: rates from 50
Mbit/s to 1 Gbit/s, 2 to 8 nodes, 10 to 100 million parameters. To the points of the rates it fits, for each strategy,

    step_s = compute_s + exposed * 8 * bytes / rate

by least squares: `exposed` is the share of the link's time that computing does not hide. The rate above which the
strategy with more bytes is the faster one is read off the measured points, not the lines. Races that are complete in
the folder given by --runs are not repeated. Writes the points and a plot beside --json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire.compare import RaceConfig, race
from thinwire.report.svg import Chart, around
from thinwire.run.config import TrainConfig

RATES = {"50mbit": 50e6, "100mbit": 100e6, "200mbit": 200e6, "500mbit": 500e6, "1gbit": 1e9}
NODES = (2, 4, 8)
# Millions of parameters and the sizes that give them.
SIZES: dict[int, dict[str, int]] = {
    10: {},
    32: {"hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 6},
    103: {"hidden_size": 1280, "intermediate_size": 2560, "num_hidden_layers": 7},
}
NAMES = ("rate", "nodes", "size")


@dataclass(frozen=True)
class Point:
    """One strategy at one place of a sweep; bytes are the kernel's, of a rank and step.

    bound_s: the least time of a step, what no schedule can hide included.
    """

    sweep: str
    nodes: int
    rate: str
    parameters_m: int
    strategy: str
    step_s: float
    sent_bytes: float
    bound_s: float

    @property
    def link_s(self) -> float:
        return 8 * self.sent_bytes / RATES[self.rate]


def places(sweep: str) -> list[tuple[int, str, int]]:
    """(nodes, rate, millions of parameters) of a sweep's points."""
    if sweep == "rate":
        return [(4, rate, 10) for rate in RATES]
    if sweep == "nodes":
        return [(nodes, "100mbit", 10) for nodes in NODES]
    return [(4, "100mbit", size) for size in SIZES]


def measure(sweep: str, place: tuple[int, str, int], strategies: list[str], steps: int, runs: Path) -> list[Point]:
    """Race the strategies at one place, or read what an earlier call measured there."""
    nodes, rate, size = place
    out = runs / f"{nodes}x-{rate}-{size}m"
    results = out / "points.json"
    if not results.exists():
        config = RaceConfig(
            strategies=",".join(strategies), lab=f"nodes={nodes},rate={rate}", rounds=2, out=str(out), overwrite=True,
            timeout=1200.0,
        )  # fmt: skip
        train = TrainConfig(
            steps=2 * steps, micro_batch=4, eval_sequences=0, checkpoint_every=0, lr=1e-3, dtype="bf16",
            tables={"llama": SIZES[size]} if SIZES[size] else {},
        )  # fmt: skip
        rows = race(config, train).contestants
        figures = [(row.name, row.mean) for row in rows if row.mean.step_s and row.mean.kernel_sent_bytes_per_step]
        found = []
        for name, f in figures:
            least_s = (f.bound_s or 0.0) + (f.unhidden_s or 0.0)
            sent_bytes = f.kernel_sent_bytes_per_step or 0.0
            found.append(Point(sweep, nodes, rate, size, name, f.step_s or 0.0, sent_bytes, least_s))
        results.write_text(json.dumps([asdict(point) for point in found], indent=1))
    return [Point(**{**values, "sweep": sweep}) for values in json.loads(results.read_text())]


def fit(points: list[Point]) -> tuple[float, float]:
    """(compute_s, exposed) of one strategy's points."""
    link = np.array([point.link_s for point in points])
    matrix = np.stack([np.ones_like(link), link], axis=1)
    # Relative errors: the slowest link must not decide alone.
    weights = 1 / np.array([point.step_s for point in points])
    solution, *_ = np.linalg.lstsq(matrix * weights[:, None], np.ones_like(link), rcond=None)
    return float(solution[0]), float(solution[1])


def crossing(a: list[Point], b: list[Point]) -> float | None:
    """The rate in bit/s above which the other strategy is the faster one; None where one is at every measured rate.

    Between the two measured rates where it changes, log(step_a / step_b) is taken as linear in log(rate).
    """
    steps_b = {RATES[p.rate]: p.step_s for p in b}
    measured = sorted(
        (RATES[p.rate], math.log(p.step_s / steps_b[RATES[p.rate]])) for p in a if RATES[p.rate] in steps_b
    )
    for (low, ahead), (high, behind) in pairwise(measured):
        if ahead * behind <= 0 and ahead != behind:
            return low * (high / low) ** (ahead / (ahead - behind))
    return None


def plot(points: list[Point], fits: dict[str, tuple[float, float]]) -> str:
    """Step time over bytes / rate, as SVG: dots are measured, lines fitted."""
    chart = Chart(
        "step time over bytes / rate", around((p.link_s for p in points), zero=True),
        around((p.step_s for p in points), zero=True), "8 bytes / rate (s)", "step (s)",
    )  # fmt: skip
    for number, (strategy, (compute_s, exposed)) in enumerate(fits.items()):
        own = [point for point in points if point.strategy == strategy]
        longest = max(point.link_s for point in own)
        chart.line([(0.0, compute_s), (longest, compute_s + exposed * longest)], f"c{number}")
        for point in own:
            chart.dot((point.link_s, point.step_s), f"c{number}")
    return chart.svg()


def report(points: list[Point]) -> tuple[list[list[str]], dict[str, tuple[float, float]]]:
    """Print the table, the fits and the crossings; rows for README.md, and the fits."""
    for p in points:
        print(
            f"{p.sweep:6s} {p.nodes} nodes  {p.rate:8s} {p.parameters_m:4d}M  {p.strategy:16s} step {p.step_s:7.3f} s  "
            f"sent {p.sent_bytes / 1e6:7.2f} MB  link {p.link_s:7.3f} s  step/bound {p.step_s / (p.bound_s or 1):.2f}"
        )
    by_strategy: dict[str, list[Point]] = {}
    for p in points:
        if p.sweep == "rate":
            by_strategy.setdefault(p.strategy, []).append(p)
    fits = {strategy: fit(own) for strategy, own in by_strategy.items() if len(own) > 1}
    for strategy, (compute_s, exposed) in fits.items():
        print(f"{strategy}: step_s = {compute_s:.3f} + {exposed:.2f} * 8 * bytes / rate")
    rows: list[list[str]] = []
    for a, b in combinations(fits, 2):
        rate = crossing(by_strategy[a], by_strategy[b])
        where = f"{rate / 1e6:.0f} Mbit/s" if rate else "none: one is faster at every measured rate"
        print(f"{a} and {b} take as long at {where}")
        rows.append([f"rate at which a step of {a} and of {b} take as long, 4 nodes, demo model", where])
    return rows, fits


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sweep", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--strategies", nargs="+", default=["ddp-bf16", "zero-bf16", "sdp4bit"])
    parser.add_argument("--steps", type=int, default=10, help="steps of each of the two rounds")
    parser.add_argument("--runs", type=Path, default=Path("runs/scaling"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    points: list[Point] = []
    for sweep in arguments.sweep:
        for place in places(sweep):
            points += measure(sweep, place, arguments.strategies, arguments.steps, arguments.runs)
    rows, fits = report(points)
    if arguments.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
        result: dict[str, Any] = {"command": "python benchmarks/scaling.py", "machine": machine, "readme": rows}
        result["points"] = [asdict(point) for point in points]
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        if fits:
            style = Path(__file__).parents[1] / "thinwire" / "report" / "race.css"
            page = f"<!doctype html><meta charset=utf-8><style>{style.read_text()}</style>"
            arguments.json.with_suffix(".html").write_text(
                page + plot([p for p in points if p.sweep == "rate"], fits) + "\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
