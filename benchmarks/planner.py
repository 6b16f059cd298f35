"""How far predictions of `thinwire plan` are from measured steps, and what choosing by them costs.

    python benchmarks/planner.py [--rates 100mbit 800mbit] [--strategies ...] [--steps 10] [--even-only]
        [--out FILE] [--most 3]
    python benchmarks/planner.py --report      # run nothing; write the page and the picture anew
    python benchmarks/planner.py --anew        # calibrate and predict anew, beside the steps that were measured

40 cells: four strategies and a pipeline of four stages, four rates, each network as it is and with node 3 at a quarter
of its rate. Four nodes of the lab train the demo model (9.7 million parameters) on 2,048 tokens a step, 10 steps in
each cell, of which the first do not count. Strategies have 2 sequences of 256 tokens a rank; the pipeline has the
order, the micro-batches, the borders and the place of each rank that are planned for its network. Before the cells of a
network its ranks are calibrated with `--models demo`, about 30 s, and everything is predicted, about 2 s; no measured
step is used for a prediction. By the predicted steps a cell takes 15 s to 3 minutes on two idle cores, most with `zero`
at 25 Mbit/s, and all of them 40 minutes. Cells that are in FILE are not measured again; --most ends after so many.

Prints for each cell the predicted and the measured median step and memory, and the parts of a step; at the end medians,
how far each part of a step is missed, and the regret: the measured step of the strategy that was chosen, over the
fastest measured one of its network. It is a regret among these five ways. Beside the plan stand other ways to choose:
always one strategy, which needs no trial, as torchtitan does, whose default is FSDP over all ranks; running some of
them, as DeepSpeed's autotuner does with the stages of ZeRO; running all of them. None of these is run: the cells of
this project stand for them. The factor of the memory comes from runs of the same model, so the memory of the cells is
no new test of it. With the usual FILE it writes table and picture to docs/tasks/plan.md.

The cores of one machine serve all nodes, so measure on an idle one. Each cell records the machine's load before it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from readme_table import with_table

from thinwire.cost import Machine
from thinwire.lab import LabSpec
from thinwire.planner.plan import plan
from thinwire.report.run import read_run
from thinwire.report.svg import Chart, alone

ROOT = Path(__file__).parents[1]
RESULTS, README_ROWS, PICTURE, PAGE = (ROOT / name for name in (
    "benchmarks/results/planner.jsonl", "benchmarks/results/planner.json", "docs/plan-errors.svg", "docs/tasks/plan.md",
))  # fmt: skip
BEGIN, END = "<!-- planner:begin -->", "<!-- planner:end -->"
NODES, SEQUENCES, SEQ_LEN = 4, 2, 256
TOKENS = NODES * SEQUENCES * SEQ_LEN
# A pipeline over all nodes, with the order and the borders that are planned for its network.
PIPELINE = f"zero[stages={NODES}]"
STRATEGIES = ("zero-bf16", "sdp4bit", "ddp-bf16", "zero", PIPELINE)
PARTS = ("compute_s", "exposed_comm_s")
RATES = ("100mbit", "200mbit", "400mbit", "800mbit")
# Other ways to choose: what each can choose from, and whether it runs all of that first. Cells of this project stand
# for them. torchtitan's default gathers weights in bf16 and sums gradients in fp32: as much as zero sends if weights
# are gathered for the forward and again for the backward, three quarters if once. The stages of ZeRO that DeepSpeed's
# autotuner tries send as these three do; it tries sizes of micro-batches too, so there are more trials than these.
PEERS = {
    "torchtitan, its default": (("zero",), False),
    "DeepSpeed, autotuning": (("zero", "zero-bf16", "ddp-bf16"), True),
}
LEAST = "at least "


@dataclass(frozen=True)
class Cell:
    """One strategy on one network; seconds of a step, bytes of a rank's memory.

    calibrated_s, planned_s: seconds that measuring the network's ranks and planning took; 0: not recorded.
    """

    network: str
    strategy: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    load: float = 0.0
    calibrated_s: float = 0.0
    planned_s: float = 0.0

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
    flags += [word for (a, b), rate in spec.link.items() for word in ("--link", f"{a}-{b}={rate}")]
    thinwire = [sys.executable, "-m", "thinwire"]
    subprocess.run([*thinwire, "lab", *flags, "--", *thinwire, *words], check=True, stdout=subprocess.DEVNULL)


def predicted(spec: LabSpec, strategies: list[str], folder: Path) -> tuple[dict[str, Any], float, float]:
    """Calibrate one network: the predicted way of each strategy, seconds of calibrating, seconds of planning."""
    file, start = folder / "machine.json", time.perf_counter()
    in_lab(spec, ["calibrate", "--models", "demo", "--out", str(file)])
    calibrated_s, machine, start = time.perf_counter() - start, Machine.read(file), time.perf_counter()
    planned = partial(
        plan, "demo", machine, tokens_per_step=TOKENS, seq_len=SEQ_LEN, micro_batch=SEQUENCES, has_groups=False
    )
    by_name: dict[str, Any] = {}
    if plain := [name for name in strategies if name != PIPELINE]:
        fastest = planned(strategies=plain, stages=1).search.fastest
        ways = [each for each in fastest if each.candidate.micro_batch == SEQUENCES]
        by_name = {name: next(each for each in ways if each.candidate.strategy == name) for name in plain}
    if PIPELINE in strategies:
        by_name[PIPELINE] = planned(strategies=["zero"], stages=NODES).best
    planned_s = time.perf_counter() - start
    print(f"{spec}: calibrated in {calibrated_s:.0f} s, planned in {planned_s:.1f} s", flush=True)
    return by_name, calibrated_s, planned_s


def cells(spec: LabSpec, strategies: list[str], steps: int, folder: Path) -> Iterator[Cell]:
    """Calibrate one network, predict, and measure: yield each cell once it is done."""
    ways, calibrated_s, planned_s = predicted(spec, strategies, folder)
    for name, way in ways.items():
        run_dir, load = folder / name, os.getloadavg()[0]
        order = ["--order", *map(str, way.order)] if way.order != tuple(range(NODES)) else []
        in_lab(spec, [
            "train", *shlex.split(way.candidate.flags), *order, "--model", "demo", "--steps", str(steps),
            "--tokens-per-step", str(TOKENS), "--dtype", "fp32", "--eval-sequences", "0", "--sample-tokens", "0",
            "--checkpoint-every", "0", "--run-dir", str(run_dir),
        ])  # fmt: skip
        summary, run = json.loads((run_dir / "summary.json").read_text()), read_run(run_dir)
        yield Cell(
            str(spec), name, way.step_s, summary["step_s"], way.memory_bytes, summary["peak_rss_bytes"],
            {part: (way.terms[part], run.typical(part)) for part in PARTS}, load, calibrated_s, planned_s,
        )  # fmt: skip


def predicted_anew(spec: LabSpec, known: Sequence[Cell], folder: Path) -> Iterator[Cell]:
    """The cells of one network with the predictions of today's code, beside what was measured before."""
    ways, calibrated_s, planned_s = predicted(spec, [cell.strategy for cell in known], folder)
    for cell in known:
        way = ways[cell.strategy]
        parts = {part: (way.terms[part], took) for part, (_, took) in cell.parts.items()}
        yield replace(
            cell, predicted_s=way.step_s, predicted_bytes=way.memory_bytes, parts=parts, calibrated_s=calibrated_s,
            planned_s=planned_s,
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


def networks_of(found: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of each network."""
    return [[cell for cell in found if cell.network == name] for name in dict.fromkeys(c.network for c in found)]


def choices(found: Sequence[Cell]) -> Iterator[tuple[str, str, list[float]]]:
    """Yield (way to choose, trials on each network, regret on each network)."""
    networks, strategies = networks_of(found), sorted({cell.strategy for cell in found})
    yield "`thinwire plan`", "0", [regret(own) for own in networks]
    for name, (known, runs) in (PEERS | {f"always {each}": ((each,), False) for each in strategies}).items():
        own = [[cell for cell in cells if cell.strategy in known] for cells in networks]
        if all(own):
            regrets = [
                regret(cells, min(ours, key=lambda cell: cell.measured_s))
                for cells, ours in zip(networks, own, strict=True)
            ]
            yield name, f"{LEAST}{len(known)}" if runs else "0", regrets
    yield "run all of them", str(len(strategies)), [1.0 for _ in networks]


def summary(found: Sequence[Cell]) -> Iterator[str]:
    """Sentences on the errors of all cells."""
    errors, memory = ([abs(getattr(cell, name)) for cell in found] for name in ("error", "memory_error"))
    yield f"{len(found)} cells: |error| of the step median {median(errors):.1%}, worst {max(errors):.1%}"
    yield f"memory: |error| median {median(memory):.1%}, worst {max(memory):.1%}"
    for part in PARTS:
        missed = [abs(cell.parts[part][0] - cell.parts[part][1]) / cell.measured_s for cell in found if cell.parts]
        if missed:
            yield f"of a step, {part} is missed by {median(missed):.1%} in the median, at worst by {max(missed):.1%}"
    for what, name in (("calibrating", "calibrated_s"), ("planning", "planned_s")):
        if took := [getattr(cell, name) for cell in found if getattr(cell, name)]:
            yield f"{what} a network took {median(took):.2g} s in the median, at most {max(took):.2g} s"
    yield f"load of the machine before a cell: median {median(cell.load for cell in found):.2g}, at most " + (
        f"{max(cell.load for cell in found):.2g}"
    )


def told(found: Sequence[Cell]) -> None:
    """Print what all cells say together."""
    print("\n".join(summary(found)))
    print("choice                    trials      regret: median  worst")
    for name, trials, regrets in choices(found):
        print(f"{name.strip('`'):<25} {trials:<11} {median(regrets):<14.3f}  {max(regrets):.3f}")


def tables(found: Sequence[Cell]) -> Iterator[str]:
    """The lines of the page."""
    yield f"![Predicted over measured seconds of a step, {len(found)} cells](../{PICTURE.name})"
    yield from ("", "; ".join(summary(found)) + ".", "")
    yield "| way to choose | trials | regret, median | worst |"
    yield "|---|---|---|---|"
    for name, trials, regrets in choices(found):
        yield f"| {name} | {trials} | {median(regrets):.3f} | {max(regrets):.3f} |"
    yield from (
        "",
        "| network | strategy | predicted | measured | error | memory, error |",
        "|---|---|---|---|---|---|",
    )
    for cell in found:
        network = cell.network.removeprefix(f"nodes={NODES},").replace(",local_size=1", "")
        seconds = f"{cell.predicted_s:.3f} s | {cell.measured_s:.3f} s | {cell.error:+.1%}"
        yield f"| {network} | `{cell.strategy}` | {seconds} | {cell.memory_error:+.1%} |"


def report(found: Sequence[Cell]) -> None:
    """Write the picture, the page, and the row for the README."""
    errors = [abs(cell.error) for cell in found]
    what = f"error of a step predicted by `thinwire plan`, {len(found)} cells of strategies and networks of 4 nodes"
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    measured = f"median {median(errors):.1%}, worst {max(errors):.1%}"
    result = {"command": "python benchmarks/planner.py", "machine": machine, "readme": [[what, measured]]}
    README_ROWS.write_text(json.dumps(result, indent=1) + "\n")
    PICTURE.write_text(picture(found))
    PAGE.write_text(with_table(PAGE.read_text(), "\n".join(tables(found)), BEGIN, END))
    print(f"written: {PICTURE.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


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
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--even-only", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--most", type=int, default=1000, help="end after so many cells")
    parser.add_argument("--report", action="store_true", help="run nothing; write the page and the picture anew")
    parser.add_argument(
        "--anew", action="store_true", help="calibrate and predict anew, beside the steps that were measured"
    )
    args = parser.parse_args()
    found = read(args.out)
    for rate in () if args.report else args.rates:
        quarter = (LabSpec(rate=rate).bits_per_second(0) or 0) / 4e6
        uneven = LabSpec(nodes=NODES, rate=rate, slow={NODES - 1: f"{quarter:g}mbit"})
        for spec in (LabSpec(nodes=NODES, rate=rate), *([] if args.even_only else [uneven])):
            if args.anew:
                with tempfile.TemporaryDirectory() as folder:
                    known = [cell for cell in found if cell.network == str(spec)]
                    new = {cell.strategy: cell for cell in predicted_anew(spec, known, Path(folder))}
                found = [new[cell.strategy] if cell.network == str(spec) else cell for cell in found]
                args.out.write_text("".join(json.dumps(asdict(each)) + "\n" for each in found))
                continue
            done = {cell.strategy for cell in found if cell.network == str(spec)}
            left = [name for name in args.strategies if name not in done]
            if left := left[: max(0, args.most)]:
                with tempfile.TemporaryDirectory() as folder:
                    for cell in cells(spec, left, args.steps, Path(folder)):
                        show(cell)
                        found.append(cell)
                        args.most -= 1
                        args.out.write_text("".join(json.dumps(asdict(each)) + "\n" for each in found))
    if not found:
        parser.error(f"{args.out}: no cell has been measured")
    told(found)
    if args.out == RESULTS:
        report(found)


def read(file: Path) -> list[Cell]:
    """The cells of an earlier start."""
    values = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [Cell(**{**each, "parts": {name: tuple(pair) for name, pair in each["parts"].items()}}) for each in values]


if __name__ == "__main__":
    main()
