"""How far predictions of `thinwire plan` are from measured steps, and what choosing by them costs.

    python benchmarks/planner.py [--rates 50mbit 100mbit 200mbit] [--strategies ...] [--steps 12] [--even-only]

Four nodes of the lab, the demo model; each network as it is, and with node 3 at a quarter of its rate. On each network
the ranks are calibrated, every strategy is predicted, and then trained; no measured step is used for a prediction.
Prints for each cell the predicted and the measured median step and memory, and for each network the regret: the
measured step of the strategy that was predicted to be the fastest, over the fastest measured one. With --json FILE the
cells are written too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from thinwire.cost import Machine
from thinwire.lab import LabSpec
from thinwire.planner.plan import plan

NODES, SEQUENCES, SEQ_LEN = 4, 4, 256
STRATEGIES = ("zero-bf16", "sdp4bit", "ddp-bf16", "zero")
RATES = ("50mbit", "100mbit", "200mbit")


@dataclass(frozen=True)
class Cell:
    """One strategy on one network; seconds of a step, bytes of a rank's memory."""

    network: str
    strategy: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def in_lab(spec: LabSpec, words: list[str]) -> None:
    """Run a command of thinwire on every node of the lab. Raises CalledProcessError."""
    flags = ["--nodes", str(spec.nodes), "--rate", spec.rate or "none"]
    flags += [word for node, rate in spec.slow.items() for word in ("--slow", f"{node}={rate}")]
    thinwire = [sys.executable, "-m", "thinwire"]
    subprocess.run([*thinwire, "lab", *flags, "--", *thinwire, *words], check=True, stdout=subprocess.DEVNULL)


def cells(spec: LabSpec, strategies: list[str], steps: int, folder: Path) -> list[Cell]:
    """Calibrate one network, predict, and measure."""
    file, network = folder / "machine.json", str(spec)
    start = time.perf_counter()
    in_lab(spec, ["calibrate", "--models", "demo", "--out", str(file)])
    calibrated_s = time.perf_counter() - start
    machine = Machine.read(file)
    start = time.perf_counter()
    found = plan(
        "demo", machine, tokens_per_step=NODES * SEQUENCES * SEQ_LEN, seq_len=SEQ_LEN, micro_batch=SEQUENCES,
        strategies=strategies, stages=1,
    )  # fmt: skip
    print(f"{network}: calibrated in {calibrated_s:.0f} s, planned in {time.perf_counter() - start:.1f} s", flush=True)
    results = []
    for name in strategies:
        ways = [each for each in found.search.fastest if each.candidate.strategy == name]
        predicted = next(each for each in ways if each.candidate.micro_batch == SEQUENCES)
        run_dir = folder / name
        in_lab(spec, [
            "train", "--strategy", name, "--model", "demo", "--steps", str(steps), "--micro-batch", str(SEQUENCES),
            "--dtype", "fp32", "--eval-sequences", "0", "--sample-tokens", "0", "--checkpoint-every", "0", "--run-dir",
            str(run_dir),
        ])  # fmt: skip
        summary = json.loads((run_dir / "summary.json").read_text())
        cell = Cell(
            network, name, predicted.step_s, summary["step_s"], predicted.memory_bytes, summary["peak_rss_bytes"]
        )
        results.append(cell)
        memory = f"memory {cell.predicted_bytes / 1e6:.0f} for {cell.measured_bytes / 1e6:.0f} MB"
        step = f"{cell.predicted_s:.3f} s for {cell.measured_s:.3f} s: {cell.error:+.1%}"
        print(f"  {name:<12} {step}; {memory}", flush=True)
    return results


def regret(found: list[Cell]) -> float:
    """Of one network."""
    chosen = min(found, key=lambda cell: cell.predicted_s)
    return chosen.measured_s / min(cell.measured_s for cell in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--even-only", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[Cell] = []
    regrets: list[float] = []
    for rate in args.rates:
        quarter = f"{LabSpec(rate=rate).bits_per_second(0) or 0:.0f}"
        uneven = LabSpec(nodes=NODES, rate=rate, slow={NODES - 1: f"{float(quarter) / 4e6:g}mbit"})
        for spec in (LabSpec(nodes=NODES, rate=rate), *([] if args.even_only else [uneven])):
            with tempfile.TemporaryDirectory() as folder:
                own = cells(spec, args.strategies, args.steps, Path(folder))
            found += own
            regrets.append(regret(own))
    errors = [abs(cell.error) for cell in found]
    print(f"{len(found)} cells: |error| median {median(errors):.1%}, worst {max(errors):.1%}")
    print(f"{len(regrets)} networks: regret median {median(regrets):.3f}, worst {max(regrets):.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(cell) for cell in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
