"""How far predictions of `thinwire plan` are from measured steps, and what choosing by them costs.

    python benchmarks/planner.py --out cells.json [--rates 50mbit 100mbit 200mbit] [--strategies ...] [--steps 12]
        [--even-only] [--plot cells.svg] [--load TEXT]

Four nodes of the lab, the demo model; each network as it is, and with node 3 at a quarter of its rate. On each network
the ranks are calibrated, every strategy is predicted, and then trained; no measured step is used for a prediction.
Prints for each cell the predicted and the measured median step and memory, and the parts of a step; for each network
the regret: the measured step of the strategy that was predicted to be the fastest, over the fastest measured one. Cells
that are in FILE are not measured again. At the end it prints medians, how far each part of a step is missed, and what
other ways to choose would cost: always one strategy, which needs no trial, or running all of them, as an autotuner that
measures its candidates does.

The cores of one machine serve all nodes, so measure on an idle one; `--load` says of the figures what else ran.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from thinwire.cost import Machine
from thinwire.lab import LabSpec
from thinwire.planner.plan import plan
from thinwire.report.run import read_run
from thinwire.report.svg import Chart, alone

NODES, SEQUENCES, SEQ_LEN = 4, 4, 256
STRATEGIES = ("zero-bf16", "sdp4bit", "ddp-bf16", "zero")
PARTS = ("compute_s", "exposed_comm_s")
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
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    load: str = ""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def in_lab(spec: LabSpec, words: list[str]) -> None:
    """Run a command of thinwire on every node of the lab. Raises CalledProcessError."""
    flags = ["--nodes", str(spec.nodes), "--rate", spec.rate or "none"]
    flags += [word for node, rate in spec.slow.items() for word in ("--slow", f"{node}={rate}")]
    thinwire = [sys.executable, "-m", "thinwire"]
    subprocess.run([*thinwire, "lab", *flags, "--", *thinwire, *words], check=True, stdout=subprocess.DEVNULL)


def cells(spec: LabSpec, strategies: list[str], steps: int, folder: Path, load: str) -> Iterator[Cell]:
    """Calibrate one network, predict, and measure: yield each cell once it is done."""
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
    for name in strategies:
        ways = [each for each in found.search.fastest if each.candidate.strategy == name]
        predicted = next(each for each in ways if each.candidate.micro_batch == SEQUENCES)
        run_dir = folder / name
        in_lab(spec, [
            "train", "--strategy", name, "--model", "demo", "--steps", str(steps), "--micro-batch", str(SEQUENCES),
            "--dtype", "fp32", "--eval-sequences", "0", "--sample-tokens", "0", "--checkpoint-every", "0", "--run-dir",
            str(run_dir),
        ])  # fmt: skip
        summary, run = json.loads((run_dir / "summary.json").read_text()), read_run(run_dir)
        yield Cell(
            network, name, predicted.step_s, summary["step_s"], predicted.memory_bytes, summary["peak_rss_bytes"],
            {part: (predicted.terms[part], run.typical(part)) for part in PARTS}, load,
        )  # fmt: skip


def show(cell: Cell) -> None:
    """Print one cell and the parts of its step."""
    memory = f"memory {cell.predicted_bytes / 1e6:.0f} for {cell.measured_bytes / 1e6:.0f} MB: {cell.memory_error:+.1%}"
    step = f"{cell.predicted_s:.3f} s for {cell.measured_s:.3f} s: {cell.error:+.1%}"
    parts = ", ".join(f"{name} {predicted:.3f} for {took:.3f}" for name, (predicted, took) in cell.parts.items())
    print(f"  {cell.strategy:<12} {step}; {memory}; {parts}", flush=True)


def regret(found: Sequence[Cell], chosen: Cell | None = None) -> float:
    """Of one network. chosen: by default the cell that was predicted to be the fastest."""
    chosen = chosen or min(found, key=lambda cell: cell.predicted_s)
    return chosen.measured_s / min(cell.measured_s for cell in found)


def told(found: Sequence[Cell]) -> None:
    """Print what all cells say together."""
    errors, memory = ([abs(getattr(cell, name)) for cell in found] for name in ("error", "memory_error"))
    print(f"{len(found)} cells: |error| median {median(errors):.1%}, worst {max(errors):.1%}")
    print(f"memory: |error| median {median(memory):.1%}, worst {max(memory):.1%}")
    for part in PARTS:
        missed = [abs(cell.parts[part][0] - cell.parts[part][1]) / cell.measured_s for cell in found if cell.parts]
        if missed:
            print(f"of a step, {part} is missed by {median(missed):.1%} in the median, at worst by {max(missed):.1%}")
    networks = [[cell for cell in found if cell.network == name] for name in dict.fromkeys(c.network for c in found)]
    strategies = sorted({cell.strategy for cell in found})
    print("choice                    trials   regret: median  worst")
    ways: dict[str, tuple[int, list[float]]] = {"thinwire plan": (0, [regret(own) for own in networks])}
    for name in strategies:
        ways[f"always {name}"] = 0, [regret(own, cell) for own in networks for cell in own if cell.strategy == name]
    ways["run all of them"] = len(strategies), [1.0 for _ in networks]
    for name, (trials, regrets) in ways.items():
        print(f"{name:<25} {trials:<8} {median(regrets):<14.3f}  {max(regrets):.3f}")
    for load in sorted({cell.load for cell in found} - {""}):
        print(f"while these were measured: {load}")


def picture(found: Sequence[Cell]) -> str:
    """Predicted over measured seconds: a point for each cell, the diagonal, and 10% beside it."""
    high = 1.1 * max(max(cell.predicted_s, cell.measured_s) for cell in found)
    names = sorted({cell.strategy for cell in found})
    chart = Chart("predicted over measured", (0.0, high), (0.0, high), "measured s", "predicted s", names=names)
    chart.area([(0.0, 0.0), (high, 0.9 * high)], [(0.0, 0.0), (high / 1.1, high)], "plain")
    chart.line([(0.0, 0.0), (high, high)], "plain")
    ends = []
    for number, name in enumerate(names):
        points = sorted((cell.measured_s, cell.predicted_s) for cell in found if cell.strategy == name)
        for point in points:
            chart.dot(point, f"c{number}", radius=4)
        ends.append((name, f"c{number}", points[-1]))
    chart.end_labels(ends)
    return alone(chart.svg())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--even-only", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--load", default="")
    args = parser.parse_args()
    found = read(args.out)
    for rate in args.rates:
        quarter = f"{LabSpec(rate=rate).bits_per_second(0) or 0:.0f}"
        uneven = LabSpec(nodes=NODES, rate=rate, slow={NODES - 1: f"{float(quarter) / 4e6:g}mbit"})
        for spec in (LabSpec(nodes=NODES, rate=rate), *([] if args.even_only else [uneven])):
            done = {cell.strategy for cell in found if cell.network == str(spec)}
            if left := [name for name in args.strategies if name not in done]:
                with tempfile.TemporaryDirectory() as folder:
                    for cell in cells(spec, left, args.steps, Path(folder), args.load):
                        show(cell)
                        found.append(cell)
                        if args.out is not None:
                            args.out.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    told(found)
    if args.plot is not None:
        args.plot.write_text(picture(found))


def read(file: Path | None) -> list[Cell]:
    """The cells of an earlier start."""
    values = json.loads(file.read_text()) if file is not None and file.exists() else []
    return [Cell(**{**each, "parts": {name: tuple(pair) for name, pair in each["parts"].items()}}) for each in values]


if __name__ == "__main__":
    main()
