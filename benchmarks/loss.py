"""What compression costs in loss: strategies against the first one, paired by seed, same tokens in the same order.

    python benchmarks/loss.py [--models tiny demo] [--seeds 0 1 2 3 4] [--json FILE]
    python benchmarks/loss.py --strategies 'zero,ef-topk[lr=3e-3]' --seeds 0 --flags --model tiny --steps 3000

Four ranks, each a node of its own, train on the standard library's sources. Without --strategies the table of SDP4Bit
is made: its halves, rotation, groups, rounding, two ranks to a node. Strategies are written as for `thinwire
compare`, with options and a learning rate of their own in brackets; --flags are flags of `thinwire train`.

Every run that has finished is a line of --runs, and is not repeated: a benchmark that is broken off goes on where it
was, and the table says how many seeds it has. Delete the file after a change of the numerics. Strategies of the
sharded host on the data axis train in this process, to the same bits as in four (benchmarks/one_process.py); others by
`thinwire train`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from one_process import train as train_here

from thinwire.compare.contestants import read_contestants
from thinwire.errors import ConfigError, Problems
from thinwire.launch.line import read_config
from thinwire.methods.sharded import ShardedMethod
from thinwire.run.config import TrainConfig
from thinwire.run.run import Run
from thinwire.run.settings import to_toml

BASE = TrainConfig(
    data="stdlib", workers=4, local_size=1, dtype="fp32", eval_sequences=256, sample_tokens=0, checkpoint_every=0
)
MODELS = {
    "tiny": replace(BASE, model="tiny", seq_len=64, micro_batch=2, steps=2000, lr=3e-3),
    "demo": replace(BASE, model="demo", seq_len=256, micro_batch=4, steps=300, lr=1e-3, dtype="bf16"),
}
MOST_SEEDS = 100
# What is varied, as a contestant, and the ranks of a node.
EXACT = "inter_gradients=fp32,vector_gradients=fp32"
VARIANTS: dict[str, tuple[str, int]] = {
    "`zero`, exact": ("zero", 1),
    "`sdp4bit`": ("sdp4bit", 1),
    "weights alone": (f"sdp4bit[{EXACT}]", 1),
    "gradients alone": ("sdp4bit[weights=fp32,vector_weights=fp32]", 1),
    "two ranks to a node": ("sdp4bit", 2),
    "not rotated": ("sdp4bit[inter_gradients=int4/64:bf16]", 1),
    "gradients in groups of 32, 4.5 bits": ("sdp4bit[inter_gradients=int4/32:bf16+hadamard32]", 1),
    "gradients in groups of 128, 4.125 bits": ("sdp4bit[inter_gradients=int4/128:bf16+hadamard32]", 1),
    "gradients to nearest": ("sdp4bit[inter_gradients=int4/64:bf16:nearest+hadamard32]", 1),
    "weights to nearest": ("sdp4bit[weights=int4/2048:nearest]", 1),
    "gradients in powers of two": ("sdp4bit[inter_gradients=e3m0/64:bf16]", 1),
}


class Results:
    """The finished runs in a file of lines, by what was asked for that is no default: options come to be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.found = {asked_for(line["config"]): line for line in map(json.loads, lines)}

    def finished(self, config: TrainConfig) -> dict | None:
        """As `run`; None where it has not finished."""
        return self.found.get(asked_for(to_toml(config)))

    def run(self, config: TrainConfig) -> dict:
        """{"config", "heldout_loss", "sent_bytes"} of a run, from the file or made now."""
        text = to_toml(config)
        key = asked_for(text)
        if key not in self.found:
            loss, sent = train(config)
            self.found[key] = {"config": text, "heldout_loss": loss, "sent_bytes": sent}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(self.found[key]) + "\n")
        return self.found[key]


def asked_for(config: str) -> str:
    """Of a configuration's TOML what differs from the defaults, in one order."""
    defaults = tomllib.loads(to_toml(TrainConfig()))
    stated = {name: value for name, value in tomllib.loads(config).items() if value not in (defaults.get(name), {})}
    return json.dumps(stated, sort_keys=True)


def train(config: TrainConfig) -> tuple[float, float]:
    """Held-out loss, and the bytes that a rank sends in a step."""
    is_alone = not config.finds_expert_ranks and config.mesh_shape.sizes["data"] == config.workers
    if isinstance(Run.of(config).strategy, ShardedMethod) and config.dtype != "auto" and is_alone:
        trained = train_here(config)
        return trained.heldout_loss, trained.sent_bytes
    with tempfile.TemporaryDirectory() as folder:
        path, run_dir = Path(folder) / "config.toml", Path(folder) / "run"
        path.write_text(to_toml(replace(config, run_dir=str(run_dir))))
        command = [sys.executable, "-m", "thinwire", "train", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((run_dir / "summary.json").read_text())
        return summary["heldout_loss"], summary["sent_bytes_per_step"]


def contestants(text: str, base: TrainConfig) -> dict[str, TrainConfig]:
    """Those that are named; exits with 2 and all that is wrong with them."""
    problems = Problems()
    found = read_contestants(text, problems, base)
    try:
        problems.raise_any()
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    return {f"`{one.name}`" if one.name != one.strategy else f"`{one}`": one.config(base) for one in found}


def races(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, TrainConfig]]]:
    """What each table is of, and its rows; the first row is the reference."""
    if arguments.strategies is not None:
        base = with_flags(MODELS["demo"], arguments.flags)
        yield f"{base.model}, {base.steps} steps", contestants(arguments.strategies, base)
        return
    for model in arguments.models:
        base = with_flags(MODELS[model], arguments.flags)
        rows = {}
        for name, (text, local_size) in VARIANTS.items():
            (rows[name],) = contestants(text, replace(base, local_size=local_size)).values()
        yield f"{model}, {base.steps} steps", rows


def with_flags(base: TrainConfig, flags: list[str]) -> TrainConfig:
    """The configuration with flags of `thinwire train` over it."""
    if not flags:
        return base
    problems = Problems()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(base))
        config = read_config([str(path), *flags], problems)
    problems.raise_any()
    return config


def gap(own: dict[int, float], reference: dict[int, float]) -> tuple[float, float, int]:
    """(mean, its standard error, seeds) of the relative difference, paired by seed."""
    gaps = [own[seed] / reference[seed] - 1 for seed in own.keys() & reference.keys()]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
    return statistics.mean(gaps), error, len(gaps)


def table(title: str, rows: dict[str, TrainConfig], results: Results) -> Iterator[tuple[str, ...]]:
    """Cells of the rows of which a run has finished: (model, what, seeds, loss, gap to the first row, bytes sent).

    All finished seeds count, also those of earlier calls.
    """
    reference: dict[int, float] = {}
    for name, config in rows.items():
        runs = {seed: run for seed in range(MOST_SEEDS) if (run := results.finished(replace(config, seed=seed)))}
        losses = {seed: run["heldout_loss"] for seed, run in runs.items()}
        reference = reference or losses
        if not losses.keys() & reference.keys():
            continue
        mean, error, paired = gap(losses, reference)
        cell = f"{mean:+.2%}" if paired == 1 else f"{mean:+.2%} ± {error:.2%}"
        sent = max(run["sent_bytes"] for run in runs.values()) / 1e6
        cell = "" if losses is reference else cell
        yield title, name, str(len(losses)), f"{statistics.mean(losses.values()):.4f}", cell, f"{sent:.3f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--strategies", help="in place of the table of SDP4Bit")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", type=Path, default=Path("benchmarks/results/loss.jsonl"))
    parser.add_argument("--finished", action="store_true", help="the table of the runs that have finished; run nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags for `thinwire train`")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(arguments.runs)
    cells: list[tuple[str, ...]] = []
    for title, rows in races(arguments):
        for name, config in rows.items():
            for seed in () if arguments.finished else arguments.seeds:
                done = results.run(replace(config, seed=seed))
                print(f"{title}, {name}, seed {seed}: held-out loss {done['heldout_loss']:.4f}", flush=True)
        cells += table(title, rows, results)
    lines = ["| model | what travels | seeds | held-out loss | to the first row | sent a step |", "|" + "---|" * 6]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    print("\n".join(lines))
    if arguments.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
        readme = [
            [f"sdp4bit: held-out loss over zero's, {model}, {seeds} seeds, mean and standard error",
             f"{over}, {sent} sent a step"]
            for model, name, seeds, _, over, sent in cells
            if name == "`sdp4bit`" and over
        ]  # fmt: skip
        result = {"command": "python benchmarks/loss.py", "machine": machine, "table": lines, "readme": readme}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
