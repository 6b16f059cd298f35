"""What a budget of memory costs: a run whose weights and states lie on a disk, beside the same run in memory.

    python benchmarks/memory.py [--model 125m] [--memory 700mb] [--workers 1] [--rates 200MB/s 400MB/s 800MB/s]
        [--steps 4] [--store DIR]

Trains the same steps in memory, then under the budget with the disk as it is, then with the disk held to each rate.
Prints for each whether losses are equal bit for bit; seconds of a step over those in memory, and over max(seconds in
memory, bytes / rate), below which no step can be; bytes that the disk moved over those that `thinwire explain` states;
the most anonymous memory of a worker over the budget. Steps are medians without the first two, after which what stays
in memory is settled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from thinwire.collectives import Topology
from thinwire.errors import Problems
from thinwire.launch.line import read_config
from thinwire.methods.memory import placed, read_byte_rate, read_bytes
from thinwire.methods.sharded import ShardedMethod
from thinwire.models.build import build_skeleton
from thinwire.run.config import derive
from thinwire.run.residency import resolved
from thinwire.run.run import Run

WARM_UP, POLL_S = 2, 0.05


@dataclass(frozen=True)
class Trained:
    """The steps of a run, and the most private memory of any of its workers."""

    steps: list[dict[str, Any]]
    peak_bytes: int

    def typical(self, name: str) -> float:
        return median(step[name] for step in self.steps[WARM_UP:])

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]


def train(folder: Path, words: list[str]) -> Trained:
    """Run `thinwire train`; raises SystemExit with its output where it fails."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "thinwire", "train", *words, "--run-dir", str(run_dir), "--overwrite"]
    log, peak_bytes = folder / "log", 0
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        while process.poll() is None:
            peak_bytes = max(peak_bytes, *anonymous_bytes(str(run_dir)), 0)
            time.sleep(POLL_S)
    if process.returncode:
        raise SystemExit(log.read_text()[-4000:])
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return Trained([json.loads(line) for line in lines], peak_bytes)


def anonymous_bytes(run_dir: str) -> list[int]:
    """Of the workers of a run."""
    found = [0]
    for process in Path("/proc").iterdir():
        try:
            is_own = process.name.isdigit() and run_dir in (process / "cmdline").read_text()
            if is_own and (process / "comm").read_text().startswith("thinwire"):
                status = (process / "status").read_text()
                found.append(1024 * int(status.split("RssAnon:")[1].split()[0]))
        except (OSError, IndexError):
            continue
    return found


def stated_bytes(words: list[str]) -> int:
    """What `thinwire explain` says that a step moves between memory and disk."""
    problems = Problems()
    run = Run.of(read_config(words, problems))
    problems.raise_any()
    skeleton = build_skeleton(run.config.model, 256, run.config.seq_len)
    residency, _ = resolved(run, skeleton)
    assert isinstance(run.strategy, ShardedMethod)
    batch = derive(run.config, run.config.num_shares)
    topology = Topology.stated(run.config.world_size, run.config.local_size or run.config.workers)
    parts = placed(residency, run.strategy, skeleton, topology, batch.accumulation)
    return sum(part.read + part.written for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="125m")
    parser.add_argument("--memory", default="700mb")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rates", nargs="*", default=["200MB/s", "400MB/s", "800MB/s"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--store", default="/var/tmp/thinwire")
    asked = parser.parse_args()
    if asked.steps <= WARM_UP:
        parser.error(f"--steps {asked.steps}: the first {WARM_UP} are not counted; nearest: {WARM_UP + 1}")
    common = {
        "model": asked.model, "workers": asked.workers, "local-size": 1, "micro-batch": 1, "steps": asked.steps,
        "seq-len": asked.seq_len, "eval-sequences": 0, "sample-tokens": 0, "checkpoint-every": 0, "timeout": 3000,
    }  # fmt: skip
    words = [part for name, value in common.items() for part in (f"--{name}", str(value))]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    budget = [*words, "--memory", asked.memory, "--store", asked.store, "--residency.weights", "disk"]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        memory = train(Path(folder), words)
        in_memory_s = memory.typical("step_s")
        print(f"in memory: {in_memory_s:.2f} s a step, {memory.peak_bytes / 1e6:.0f} MB of anonymous memory")
        for rate in (None, *asked.rates):
            held = [] if rate is None else ["--residency.disk-rate", rate]
            disk = train(Path(folder), [*budget, *held])
            moved = disk.typical("disk_read_bytes") + disk.typical("disk_written_bytes")
            step_s, peak = disk.typical("step_s"), disk.peak_bytes
            bound_s = max(in_memory_s, moved / read_byte_rate(rate) if rate else 0.0)
            print(f"{asked.memory}, disk {rate or 'as it is'}:")
            print(f"  losses {'equal' if disk.losses == memory.losses else 'DIFFER'}")
            print(
                f"  {step_s:.2f} s a step: {step_s / in_memory_s:.2f} of in memory, {step_s / bound_s:.2f} of the bound"
            )
            print(f"  {moved / 1e9:.3f} GB a step: {moved / stated_bytes(budget):.3f} of what is stated")
            print(f"  {peak / 1e6:.0f} MB: {peak / read_bytes(asked.memory):.2f} of the budget", flush=True)


if __name__ == "__main__":
    main()
