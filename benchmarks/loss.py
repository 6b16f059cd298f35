"""What compression costs in loss: strategies against `zero`, same seeds, same tokens in the same order.

    python benchmarks/loss.py [--strategies zero sdp4bit] [--seeds 0 1 2] [--steps 300] [--json FILE]

Each run is a `thinwire train` of the demo model on the standard library's sources, four workers, each a node of its
own. Prints held-out loss for every strategy and seed, and the mean over seeds as a ratio to `zero`. Runs that are
complete in the folder given by --runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch


def train(folder: Path, strategy: str, seed: int, steps: int, flags: list[str]) -> dict:
    """The summary of one run, taken from disk where it was completed before."""
    run_dir = folder / f"{strategy}-{seed}"
    summary = run_dir / "summary.json"
    if not summary.exists():
        command = [
            sys.executable, "-m", "thinwire", "train", "--model", "demo", "--data", "stdlib", "--strategy", strategy,
            "--workers", "4", "--local-size", "1", "--steps", str(steps), "--micro-batch", "4", "--lr", "1e-3",
            "--eval-sequences", "256", "--sample-tokens", "0", "--checkpoint-every", "0", "--seed", str(seed),
            "--run-dir", str(run_dir), "--overwrite", *flags,
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(summary.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=["zero", "sdp4bit"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=Path, default=Path("runs/loss"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags for `thinwire train`")
    arguments = parser.parse_args()
    losses: dict[str, list[float]] = {strategy: [] for strategy in arguments.strategies}
    sent: dict[str, float] = {}
    for seed in arguments.seeds:
        for strategy in arguments.strategies:
            summary = train(arguments.runs, strategy, seed, arguments.steps, arguments.flags)
            losses[strategy].append(summary["heldout_loss"])
            sent[strategy] = summary["sent_bytes_per_step"] / 1e6
            print(f"seed {seed}  {strategy:20s} held-out loss {losses[strategy][-1]:.4f}", flush=True)
    reference = statistics.mean(losses[arguments.strategies[0]])
    rows = []
    for strategy, values in losses.items():
        mean = statistics.mean(values)
        print(f"{strategy:20s} mean {mean:.4f}  {mean / reference - 1:+.3%}  sent {sent[strategy]:.3f} MB a step")
        rows.append(
            [f"{strategy}: held-out loss after {arguments.steps} steps, mean of {len(values)} seeds, over zero's",
             f"{mean:.4f} / {reference:.4f} = {mean / reference:.4f}, {sent[strategy]:.2f} MB sent a step"]
        )  # fmt: skip
    if arguments.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
        result = {"command": "python benchmarks/loss.py", "machine": machine, "losses": losses, "readme": rows[1:]}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
