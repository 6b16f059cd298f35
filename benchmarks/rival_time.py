"""Processor time of a step: a rival's program beside the strategy that it rivals, messages over loopback included.

    python benchmarks/rival_time.py demo benchmarks/original_demo.py

Four ranks train the preset `tiny`. A step's time is that of all processes of a run of 220 steps, less that of a run of
20, by 200 steps and by rank. The runs are interleaved; the table shows the median of the repeats and their range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

from frontier import processor_s
from loss import MODELS

from thinwire.launch.machine import free_port
from thinwire.run.settings import to_toml

Dtype = Literal["fp32", "bf16"]
FEW, MANY, WORKERS = 20, 220, 4
ENV = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run_s(strategy: str, rival: str | None, dtype: Dtype, steps: int) -> float:
    """Processor time of one run, the rival's if one is named."""
    config = replace(
        MODELS["tiny"], strategy=strategy, dtype=dtype, steps=steps, workers=WORKERS, eval_sequences=8, sample_tokens=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path, run_dir = Path(folder) / "config.toml", str(Path(folder) / "run")
        path.write_text(to_toml(config))
        if rival is None:
            return processor_s([sys.executable, "-m", "thinwire", "train", str(path), "--run-dir", run_dir], ENV)
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS), "--master-addr", "127.0.0.1"]
        flags = ["--config", str(path), "--run-dir", run_dir, "--steps", str(steps)]
        return processor_s([sys.executable, *launch, "--master-port", str(free_port()), rival, *flags], ENV)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("strategy")
    parser.add_argument("rival", help="a program with the flags of benchmarks/rival.py")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print("| dtype | program | processor time of a step | lowest to highest | to the strategy's |")
    print("|" + "---|" * 5)
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16")
    for dtype in dtypes:
        found: dict[str | None, list[float]] = {None: [], arguments.rival: []}
        for _ in range(arguments.repeats):
            for rival, times in found.items():
                many, few = (run_s(arguments.strategy, rival, dtype, steps) for steps in (MANY, FEW))
                times.append(1e3 * (many - few) / (MANY - FEW) / WORKERS)
        own = statistics.median(found[None])
        for rival, times in found.items():
            time_ms = statistics.median(times)
            scatter = f"{min(times):.1f} to {max(times):.1f} ms"
            cells = [dtype, rival or arguments.strategy, f"{time_ms:.1f} ms", scatter, f"{time_ms / own:.2f}"]
            print("| " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
