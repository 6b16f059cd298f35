"""What compression costs in loss: strategies against the first one, same seeds, same tokens in the same order.

    python benchmarks/loss.py [--strategies 'zero,sdp4bit,ef-topk[lr=3e-3]'] [--seeds 0 1 2] [--steps 300] [--json FILE]

Each run is a `thinwire train` of the demo model on the standard library's sources, four workers, each a node of its
own. Strategies are written as for `thinwire compare`, with options and a learning rate of their own in brackets. Prints
held-out loss for every strategy and seed, and the mean over seeds as a ratio to the first strategy's. Runs that are
complete in the folder given by --runs, with the same options, are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from thinwire.compare.contestants import Contestant, read_contestants
from thinwire.errors import ConfigError, Problems
from thinwire.training.config import TrainConfig
from thinwire.training.settings import to_toml

BASE = TrainConfig(
    model="demo", data="stdlib", workers=4, local_size=1, micro_batch=4, lr=1e-3, eval_sequences=256, sample_tokens=0,
    checkpoint_every=0,
)  # fmt: skip


def train(folder: Path, contestant: Contestant, seed: int, steps: int, flags: list[str]) -> dict:
    """The summary of one run, taken from disk where it was completed before."""
    run_dir = folder / f"{contestant.name}-{seed}"
    summary, config = run_dir / "summary.json", folder / f"{run_dir.name}.toml"
    # The flags belong to what was asked for as much as the configuration does.
    asked = to_toml(replace(contestant.config(BASE), seed=seed, steps=steps, run_dir=str(run_dir))) + f"# {flags}\n"
    if not summary.exists() or not config.exists() or config.read_text() != asked:
        folder.mkdir(parents=True, exist_ok=True)
        summary.unlink(missing_ok=True)
        config.write_text(asked)
        command = [sys.executable, "-m", "thinwire", "train", str(config), "--overwrite", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(summary.read_text())


def contestants(text: str, steps: int) -> list[Contestant]:
    """Those that are named; exits with 2 and all that is wrong with them."""
    problems = Problems()
    found = read_contestants(text, problems, replace(BASE, steps=steps))
    try:
        problems.raise_any()
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategies", default="zero,sdp4bit")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=Path, default=Path("runs/loss"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags for `thinwire train`")
    arguments = parser.parse_args()
    racing = contestants(arguments.strategies, arguments.steps)
    losses: dict[str, list[float]] = {str(one): [] for one in racing}
    sent: dict[str, float] = {}
    for seed in arguments.seeds:
        for one in racing:
            summary = train(arguments.runs, one, seed, arguments.steps, arguments.flags)
            losses[str(one)].append(summary["heldout_loss"])
            sent[str(one)] = summary["sent_bytes_per_step"] / 1e6
            print(f"seed {seed}  {one!s:30s} held-out loss {losses[str(one)][-1]:.4f}", flush=True)
    first = str(racing[0])
    reference = statistics.mean(losses[first])
    rows = []
    for name, values in losses.items():
        mean = statistics.mean(values)
        print(f"{name:30s} mean {mean:.4f}  {mean / reference - 1:+.3%}  sent {sent[name]:.3f} MB a step")
        rows.append(
            [f"{name}: held-out loss after {arguments.steps} steps, mean of {len(values)} seeds, over {first}'s",
             f"{mean:.4f} / {reference:.4f} = {mean / reference:.4f}, {sent[name]:.2f} MB sent a step"]
        )  # fmt: skip
    if arguments.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
        result = {"command": "python benchmarks/loss.py", "machine": machine, "losses": losses, "readme": rows[1:]}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
