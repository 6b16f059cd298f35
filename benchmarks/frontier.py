"""The frontier of the house: held-out loss over all bytes sent, at equal tokens, of every method.

    python benchmarks/frontier.py [--models demo tiny] [--methods zero demo ...] [--seeds 0 1 2] [--minutes 60]
    python benchmarks/frontier.py --models tiny --steps 500     # a slice of another length
    python benchmarks/frontier.py --report                      # run nothing; write the table and the plot anew

Four ranks, each a node or an island of its own, train on the standard library's sources. Every method takes its
learning rate from one grid of five: that of the lowest held-out loss in runs of a fifth of the length, with warm-up,
decay and a seed of their own; of a slice, such a run has the whole length. Then it trains
once with each seed. All methods so have the same number of trials and of tokens, and a method costs one run for the
rate and one for each seed.

A run that has finished is a line of benchmarks/results/frontier.jsonl and is not repeated, so the benchmark may be
broken off, or run in parts; no run begins after --minutes. Two processes may write to the file if they have different
--methods. Delete the lines of a method when its numerics change. What can't train in one process
(benchmarks/one_process.py) trains by `thinwire train`.

It writes what docs/methods.md shows between two marks, its plots, and thinwire/report/frontier.json, from which
`thinwire explain` recommends.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loss import MODELS, contestants
from one_process import train as train_here
from readme_table import with_table

from thinwire.errors import ConfigError
from thinwire.report.frontier import LEAST_STEPS, RECORDED, beaten, frontier_svg, minutes_near, recorded_outcomes
from thinwire.report.run import RunFiles, mean_losses, read_run
from thinwire.report.units import bytes_text
from thinwire.run.config import TrainConfig
from thinwire.run.settings import to_toml

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- frontier:begin -->", "<!-- frontier:end -->"
STEPS = {"demo": 1000, "tiny": 5000}
GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
# Of the runs by which rates are chosen; not one of those that are reported. Those of the full size are shorter by
# TUNING_PART.
TUNING_SEED, TUNING_PART = 1000, 5
# Of a short run, whose processor time is that of starting, compiling and the held-out loss.
FEW_STEPS = 20
# Points of the curve of a run: the mean training loss of a fiftieth of the steps, and of at least MIN_WINDOW.
NUM_POINTS, MIN_WINDOW = 100, 20
NEAR = 1.01
# Of the table's links, in bit/s.
RATES = (10e6, 20e6, 50e6, 100e6)
EXACT = "zero"
# As contestants of `thinwire compare`. All others in the house are these with another wrapper, pace or purpose.
METHODS = {
    EXACT: "zero",
    "zero, muon": "zero[optimizer=muon]",
    "zero-bf16": "zero-bf16",
    "sdp4bit": "sdp4bit",
    "sdp4bit, loco": "sdp4bit[loco=true]",
    "sdp4bit, muon": "sdp4bit[optimizer=muon]",
    "zero-compressed, signs": "zero-compressed",
    "zero-compressed, 1% of differences": "zero-compressed[gradients=topk1%/1024,feedback=estimates]",
    "powersgd, rank 16, int8": "powersgd[rank=16,codec=int8/128:bf16:nearest,start_step=0]",
    "powersgd, rank 4, int8": "powersgd[rank=4,codec=int8/128:bf16:nearest,start_step=0]",
    "powersgd-torch, rank 4": "powersgd-torch[start_step=2]",
    "onebit-adam": "onebit-adam",
    "ef-integer": "ef-integer",
    "ef-topk": "ef-topk",
    "ef21": "ef21",
    "ef21, momentum": "ef21[fresh=0.1]",
    "two-way": "two-way[min_bytes=4096]",
    "lgreco-ef-topk": "lgreco-ef-topk",
    "dgc": "dgc[density=0.01]",
    "sketch": "sketch",
    "demo": "demo",
    "demo, signs": "demo[values=sign/32:bf16]",
    "dion": "dion",
    "dion, over shards": "zero[optimizer=dion]",
    "zeropp": "zeropp",
    "frontier": "frontier",
    "diloco, H 15": "diloco[sync_every=15]",
    "diloco, H 50": "diloco[sync_every=50]",
    "streaming-diloco": "streaming-diloco",
    "sparseloco, H 15": "sparseloco",
    "sparseloco, H 50": "sparseloco[sync_every=50]",
    # As many bytes as a fiftieth of diloco's.
    "sparseloco, H 15, 6%": "sparseloco[codec=topk6.25%/4096:(sign/64:bf16+twice)]",
    "sparseloco, H 50, 6%": "sparseloco[sync_every=50,codec=topk6.25%/4096:(sign/64:bf16+twice)]",
    "muloco, H 15": "muloco[sync_every=15]",
    "sparseloco, H 2, muon": "sparseloco[optimizer=muon,sync_every=2]",
    "sparseloco, H 6, muon": "sparseloco[optimizer=muon,sync_every=6]",
    "sparseloco, H 15, muon": "sparseloco[optimizer=muon]",
}


class Runs:
    """The finished runs in a file of lines, by model, steps, method, learning rate and seed."""

    def __init__(self, path: Path, deadline: float) -> None:
        self.path, self.deadline = path, deadline
        lines = path.read_text().splitlines() if path.exists() else []
        self.found = {self.key(line): line for line in map(json.loads, lines)}

    @staticmethod
    def key(line: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(line[name] for name in ("model", "steps", "method", "text", "lr", "seed"))

    def get(self, name: str, config: TrainConfig) -> dict[str, Any] | None:
        return self.found.get(self.key(asked(name, config)))

    def run(self, name: str, config: TrainConfig) -> dict[str, Any] | None:
        """A run, from the file or made now; None after the deadline."""
        if (found := self.get(name, config)) is not None:
            return found
        if time.monotonic() > self.deadline:
            return None
        line = asked(name, config) | trained(config)
        self.found[self.key(line)] = line
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{config.model}, {config.steps} steps, {name}, lr {config.lr:g}, seed {config.seed}: "
              f"held-out loss {line['heldout_loss']:.4f}", flush=True)  # fmt: skip
        return line


def asked(name: str, config: TrainConfig) -> dict[str, Any]:
    """What a line of the file is found by."""
    return {
        "model": config.model, "steps": config.steps, "method": name, "text": METHODS[name], "lr": config.lr,
        "seed": config.seed,
    }  # fmt: skip


def trained(config: TrainConfig) -> dict[str, Any]:
    """{"heldout_loss", "compute_s", "curve"} of a run; curve: (step, loss, bytes sent so far) at NUM_POINTS steps.

    compute_s: a rank's processor time of a step.
    """
    try:
        told = train_here(config)
        losses, sent, heldout, compute_s = told.losses, told.sent, told.heldout_loss, told.compute_s
    except ConfigError as error:
        print(f"by processes: {error}", flush=True)
        losses, sent, heldout, compute_s = train_by_processes(config)
    window = max(MIN_WINDOW, config.steps // (NUM_POINTS // 2))
    steps = sorted({round(config.steps * point / NUM_POINTS) for point in range(1, NUM_POINTS + 1)} - {0})
    curve = [(step, round(statistics.fmean(losses[max(0, step - window) : step]), 4), sent[step - 1]) for step in steps]
    return {"heldout_loss": heldout, "compute_s": round(compute_s, 5), "curve": curve}


def train_by_processes(config: TrainConfig) -> tuple[list[float], list[int], float, float]:
    """Losses, bytes sent so far, held-out loss and a rank's processor time of a step, by `thinwire train`.

    The time includes copies to and from sockets.
    """
    few = max(1, min(FEW_STEPS, config.steps // 2))
    base = MODELS[config.model]
    start_s = starting_s(to_toml(replace(config, steps=few, lr=base.lr, seed=base.seed)))
    run, losses, all_s = by_command(to_toml(config))
    sent: list[int] = []
    for row in run.steps:
        sent.append(int(row["sent_bytes"]) + (sent[-1] if sent else 0))
    sent[-1] += int(run.summary.get("last_exchange_bytes", 0))
    compute_s = (all_s - start_s) / max(1, config.steps - few) / config.workers
    heldout = run.summary["heldout_loss"]
    return losses, sent, math.nan if heldout is None else heldout, compute_s


@functools.cache
def starting_s(config: str) -> float:
    """Processor time of all processes of a short run. Of one rate and seed: starting takes as much with any other."""
    return by_command(config)[2]


def by_command(config: str) -> tuple[RunFiles, list[float], float]:
    """What `thinwire train` writes for a configuration in TOML, its losses, and its processes' processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path, run_dir = Path(folder) / "config.toml", Path(folder) / "run"
        path.write_text(config)
        all_s = processor_s([sys.executable, "-m", "thinwire", "train", str(path), "--run-dir", str(run_dir)])
        run = read_run(run_dir)
        return run, [*mean_losses(run).values()], all_s


def processor_s(command: Sequence[str], env: Mapping[str, str] | None = None) -> float:
    """Processor time of a command and of all processes that it starts and waits for. env: in place of this one's."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def configs(model: str, steps: int, names: Sequence[str]) -> dict[str, TrainConfig]:
    """The training of each method, with the rate and the seed of the preset."""
    base = replace(MODELS[model], steps=steps)
    return {name: next(iter(contestants(METHODS[name], base).values())) for name in names}


def tuned_lr(name: str, config: TrainConfig, runs: Runs, *, is_asked: bool) -> float | None:
    """The best rate of the grid; None unless all of its runs have finished. A run that diverged is the worst."""
    part = TUNING_PART if config.steps >= STEPS[config.model] else 1
    trial = replace(config, seed=TUNING_SEED, steps=config.steps // part)
    found = {}
    for lr in GRID:
        line = runs.run(name, replace(trial, lr=lr)) if is_asked else runs.get(name, replace(trial, lr=lr))
        if line is None:
            return None
        found[lr] = loss_of(line)
    return min(found, key=lambda lr: found[lr])


def loss_of(line: Mapping[str, Any]) -> float:
    """The held-out loss of a run; infinite if it diverged."""
    loss = line["heldout_loss"]
    return loss if loss is not None and math.isfinite(loss) else math.inf


def run_all(models: Sequence[str], names: Sequence[str], seeds: Sequence[int], steps: int | None, runs: Runs) -> None:
    """Every run that is missing: one seed of all methods before the next."""
    for model in models:
        rows = configs(model, steps or STEPS[model], names)
        for seed in seeds:
            for name, config in rows.items():
                if (lr := tuned_lr(name, config, runs, is_asked=True)) is not None:
                    runs.run(name, replace(config, lr=lr, seed=seed))


def point_near(run: Mapping[str, Any], target: float, compute_s: float) -> dict[str, float] | None:
    """Steps, and a rank's processor time and sent bytes, until the training loss is at most `target`.

    compute_s: the processor time of a step.
    """
    for step, loss, sent in run["curve"]:
        if loss <= target:
            return {"steps": step, "compute_s": step * compute_s, "sent_bytes": sent}
    return None


def least_compute_s(model: str, name: str, runs: Runs) -> float:
    """Processor time of a step: the least of all runs of a method, since other work on the machine adds to it."""
    asked_for = (model, name, METHODS[name])
    return float(min(
        line["compute_s"] for line in runs.found.values()
        if (line["model"], line["method"], line["text"]) == asked_for
    ))  # fmt: skip


def mean_if_all(found: Sequence[dict[str, float] | None], steps: int) -> dict[str, float] | None:
    """The mean point; None if one is missing, or the runs are too short to show an order of methods."""
    known = [point for point in found if point is not None]
    if len(known) < len(found) or steps < LEAST_STEPS:
        return None
    return {name: statistics.fmean(point[name] for point in known) for name in known[0]}


def points(model: str, steps: int, runs: Runs) -> list[dict[str, Any]]:
    """What is known of each method: means over the seeds, paired with the exact run's; the exact one first.

    A method of which a run diverged is left out, see `diverged`.
    """
    found: list[dict[str, Any]] = []
    exact: dict[int, dict[str, Any]] = {}
    for name, config in configs(model, steps, list(METHODS)).items():
        lr, own = reported(name, config, runs)
        exact = exact or (own if name == EXACT else {})
        seeds = sorted(own.keys() & exact.keys())
        if not seeds or any(loss_of(line) == math.inf for line in own.values()):
            continue
        losses = [own[seed]["heldout_loss"] for seed in seeds]
        gaps = [own[seed]["heldout_loss"] / exact[seed]["heldout_loss"] - 1 for seed in seeds]
        targets = {seed: NEAR * exact[seed]["curve"][-1][1] for seed in seeds}
        compute_s = least_compute_s(model, name, runs)
        near = mean_if_all([point_near(own[seed], targets[seed], compute_s) for seed in seeds], steps)
        found.append({
            "model": model, "steps": steps, "methods": len(METHODS), "method": name, "text": METHODS[name], "lr": lr,
            "seeds": len(seeds), "losses": {str(seed): own[seed]["heldout_loss"] for seed in seeds},
            "loss": statistics.fmean(losses), "loss_error": standard_error(losses),
            "gap": statistics.fmean(gaps), "gap_error": standard_error(gaps),
            "sent_bytes": statistics.fmean(own[seed]["curve"][-1][2] for seed in seeds), "near": near,
        })  # fmt: skip
    return found


def reported(name: str, config: TrainConfig, runs: Runs) -> tuple[float | None, dict[int, dict[str, Any]]]:
    """A method's rate, and its finished runs at that rate, by seed."""
    lr = tuned_lr(name, config, runs, is_asked=False)
    key = (config.model, config.steps, name, METHODS[name], lr)
    lines = [line for line in runs.found.values() if Runs.key(line)[:5] == key]
    return lr, {line["seed"]: line for line in lines if line["seed"] != TUNING_SEED}


def diverged(model: str, steps: int, runs: Runs) -> list[str]:
    """The methods of which a run at the chosen rate diverged."""
    found = {name: reported(name, config, runs)[1] for name, config in configs(model, steps, list(METHODS)).items()}
    return [name for name, own in found.items() if any(loss_of(line) == math.inf for line in own.values())]


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lines of one model's table, fewest bytes last; a rate at an end of the grid has a star."""
    head = ["method", "sent in all", "fewer", "lr", "seeds", "held-out loss", f"to `{EXACT}`"]
    head += [f"at {rate / 1e6:g} Mbit/s" for rate in RATES]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    grey = beaten(recorded_outcomes(found))
    for row in sorted(found, key=lambda row: -row["sent_bytes"]):
        is_exact, is_one = row["method"] == EXACT, row["seeds"] == 1
        gap = f"{row['gap']:+.2%}" + ("" if is_one else f" ± {row['gap_error']:.2%}")
        loss = f"{row['loss']:.4f}" + ("" if is_one else f" ± {row['loss_error']:.4f}")
        minutes = ["-" if one is None else f"{one:.1f} min" for one in (minutes_near(row, rate) for rate in RATES)]
        name = f"{row['method']} (beaten)" if row["method"] in grey else f"**{row['method']}**"
        star = "*" if row["lr"] in (GRID[0], GRID[-1]) else ""
        cells = [
            name, bytes_text(row["sent_bytes"]), f"{found[0]['sent_bytes'] / row['sent_bytes']:.3g}x",
            f"{row['lr']:g}{star}", str(row["seeds"]), loss, "" if is_exact else gap, *minutes,
        ]  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


def tables(model: str, runs: Runs) -> list[list[dict[str, Any]]]:
    """The rows of runs of each length, the longest first. Lengths of fewer than two methods don't count."""
    lengths = sorted({line["steps"] for line in runs.found.values() if line["model"] == model}, reverse=True)
    return [found for steps in lengths if len(found := points(model, steps, runs)) > 1]


def report(runs: Runs) -> None:
    """Write the tables and the plots of all that has finished; what is recommended follows the longest runs."""
    parts, recorded = [], []
    for model in STEPS:
        for number, found in enumerate(tables(model, runs)):
            steps = found[0]["steps"]
            recorded += [] if number else found
            name = f"frontier-{model}-{steps}.svg" if number else f"frontier-{model}.svg"
            (ROOT / "docs" / name).write_text(frontier_svg(recorded_outcomes(found)))
            parts += [
                f"### {model}, {steps:,} steps, {len(found)} of {len(METHODS)} methods", "",
                f"![Held-out loss over bytes sent]({name})", "",
            ]  # fmt: skip
            parts += [*table(found), ""]
            if lost := diverged(model, steps, runs):
                parts += [f"Not shown, since a run diverged at the best rate: {', '.join(lost)}.", ""]
    page = ROOT / "docs/methods.md"
    page.write_text(with_table(page.read_text(), "\n".join(parts).rstrip() or "No run has finished.", BEGIN, END))
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"docs/methods.md: {len(recorded)} recorded rows of the frontier")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="in place of 1,000 for demo and 5,000 for tiny")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many minutes")
    parser.add_argument("--runs", type=Path, default=ROOT / "benchmarks/results/frontier.jsonl")
    parser.add_argument("--report", action="store_true", help="run nothing; write the page anew")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = Runs(arguments.runs, time.monotonic() + 60 * arguments.minutes)
    if not arguments.report:
        run_all(arguments.models, arguments.methods, arguments.seeds, arguments.steps, runs)
    report(runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
