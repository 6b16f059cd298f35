"""What a budget of memory costs: a run whose weights and states lie on a disk, beside the same run in memory.

    python benchmarks/memory.py [--budget] [--plot] [--links] [--optimizers] [--expanded] [--most-minutes 10]
        [--model NAME] [--memory 900mb] [--workers 1] [--rates 200MB/s 400MB/s 800MB/s] [--steps 4] [--store DIR]
        [--budgets 900mb 1200mb 1500mb 1800mb] [options of `thinwire train`, for budget and plot]

Each flag runs one part; without any, the first. Options of the table [residency] are those of the runs under a budget,
all others those of each. A run that takes longer than --most-minutes is ended, and its part with it. The parts have 5,
5, 3, 60 and 3 runs by default.

budget: trains the same steps in memory, then under the budget with the disk as it is, then with the disk held to each
rate. Prints for each whether losses are equal bit for bit; seconds of a step over those in memory, and over max(seconds
in memory, bytes / rate), below which no step can be; bytes that the disk moved over those that `thinwire explain`
states; the most anonymous memory of a worker over the budget, and over what `thinwire explain` states. Steps are
medians without the first two, after which what stays in memory is settled.

plot: trains the same steps in memory and under each of the budgets, where `auto` decides what lies on the disk. Writes
seconds of a step, peaks and bytes moved to benchmarks/results/memory.json, and the plots that
docs/tasks/larger-than-memory.md shows.

links: four nodes at 100 Mbit/s in the lab, of `demo` by default. Prints the tokens per second of sdp4bit with all on a
disk over those in memory, and over those of weights in bf16 that are cut over the ranks.

optimizers: prints the bytes of Mini's sums over those of sdp4bit, and the held-out loss over AdamW's of apollo,
apollo-mini, 8-bit moments, and sampled rows in two epochs: the mean of the seeds at the best of the learning rates,
which are higher for the two apollos, whose updates are smaller.

expanded: trains a small model, expands it, and trains the result and a model of its size from scratch. Prints at which
share of the tokens from scratch the expanded one has the loss that the other has at its end; tokens of the small one
are not counted.

No part races DeepSpeed: its path to a disk is an extension that is compiled against libaio when it is first used, and
0.19.8 refuses it where libaio's headers are missing. Where they are there, `thinwire compare` takes a script of it as a
contestant `cmd:`.

benchmarks/losses.py has the time and memory of a cut loss.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event, Timer
from typing import IO, Any

from thinwire.data import load_tokenizer
from thinwire.errors import Problems
from thinwire.launch.line import read_config
from thinwire.methods.memory import MemoryPart, in_use, placed, read_byte_rate, read_bytes
from thinwire.models.build import build_skeleton
from thinwire.options import model_table
from thinwire.report.machine import machine
from thinwire.report.svg import Chart, alone
from thinwire.run.residency import resolved
from thinwire.run.run import Run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "memory.json"
WARM_UP, POLL_S = 2, 0.05
# Steps of which the mean loss is compared.
WINDOW = 20
# Of one run.
MOST_MINUTES = [10.0]


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
    """Run `thinwire train`; raises TooLong, and SystemExit with its output where it fails."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "thinwire", "train", *words, "--run-dir", str(run_dir), "--overwrite"]
    log, peak_bytes = folder / "log", 0
    with log.open("w") as out, started(command, out) as process:
        while process.poll() is None:
            peak_bytes = max(peak_bytes, *anonymous_bytes(str(run_dir)), 0)
            time.sleep(POLL_S)
    if process.returncode:
        raise SystemExit(log.read_text()[-4000:])
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return Trained([json.loads(line) for line in lines], peak_bytes)


class TooLong(Exception):
    """A run took longer than --most-minutes."""


@contextmanager
def started(command: list[str], out: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process, which is ended with all that it has started when its time is over."""
    process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    is_late = Event()

    def end() -> None:
        is_late.set()
        os.killpg(process.pid, signal.SIGTERM)

    timer = Timer(60 * MOST_MINUTES[0], end)
    timer.start()
    try:
        yield process
        process.wait()
    finally:
        timer.cancel()
    if is_late.is_set():
        raise TooLong(f"took longer than {MOST_MINUTES[0]:g} minutes: {shlex.join(command[2:])}")


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


def stated(words: list[str]) -> tuple[list[MemoryPart], int]:
    """What `thinwire explain` says that lies where, and that a step moves; and the memory in use."""
    problems = Problems()
    run = Run.of(read_config(words, problems))
    problems.raise_any()
    config, words_of = run.config, load_tokenizer(run.config.tokenizer).vocab_size
    fields = config.tables.get(model_table(config.model) or "")
    residency, setup = resolved(run, build_skeleton(config.model, words_of, config.seq_len, fields))
    parts = list(placed(residency, setup))
    return parts, in_use(parts, setup)


def words_of(asked: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Options of `thinwire train` for all runs, and those besides for runs under a budget."""
    common = {
        "model": asked.model or "125m", "workers": asked.workers, "local-size": 1, "micro-batch": 1,
        "steps": asked.steps, "seq-len": asked.seq_len, "eval-sequences": 0, "sample-tokens": 0,
        "checkpoint-every": 0, "timeout": 3000,
    }  # fmt: skip
    words = [part for name, value in common.items() for part in (f"--{name}", str(value))]
    own = options_of(asked.more, "--residency.")
    return [*words, *options_of(asked.more, "--residency.", without=True)], ["--store", asked.store, *own]


def print_budget(folder: Path, asked: argparse.Namespace) -> None:
    """Steps under a budget over steps in memory."""
    words, own = words_of(asked)
    own = own if "--residency.weights" in own else [*own, "--residency.weights", "disk"]
    budget = [*words, "--memory", asked.memory, *own]
    parts, says = stated(budget)
    says_moved = sum(part.read + part.written for part in parts)
    memory = train(folder, words)
    in_memory_s = memory.typical("step_s")
    print(f"in memory: {in_memory_s:.2f} s a step, {memory.peak_bytes / 1e6:.0f} MB of anonymous memory")
    for rate in (None, *asked.rates):
        held = [] if rate is None else ["--residency.disk-rate", rate]
        disk = train(folder, [*budget, *held])
        moved = disk.typical("disk_read_bytes") + disk.typical("disk_written_bytes")
        step_s, peak = disk.typical("step_s"), disk.peak_bytes
        bound_s = max(in_memory_s, moved / read_byte_rate(rate) if rate else 0.0)
        print(f"{asked.memory}, disk {rate or 'as it is'}:")
        print(f"  losses {'equal' if disk.losses == memory.losses else 'DIFFER'}")
        print(f"  {step_s:.2f} s a step: {step_s / in_memory_s:.2f} of in memory, {step_s / bound_s:.2f} of the bound")
        print(f"  {moved / 1e9:.3f} GB a step: {moved / says_moved:.3f} of what is stated")
        print(
            f"  {peak / 1e6:.0f} MB: {peak / read_bytes(asked.memory):.2f} of the budget, {peak / says:.2f} of what is "
            "stated",
            flush=True,
        )


def write_plot(folder: Path, asked: argparse.Namespace) -> None:
    """Seconds of a step, and peaks, over the budget."""
    words, own = words_of(asked)
    found = list[dict[str, Any]]()
    for budget in (None, *asked.budgets):
        run = train(folder, words if budget is None else [*words, "--memory", budget, *own])
        moved = run.typical("disk_read_bytes") + run.typical("disk_written_bytes") if budget else 0
        budget_bytes = None if budget is None else read_bytes(budget)
        figures = {"step_s": run.typical("step_s"), "peak_bytes": run.peak_bytes, "moved_bytes": moved}
        found.append({"budget_bytes": budget_bytes, **figures})
        print(f"{budget or 'in memory'}: {json.dumps(figures)}", flush=True)
    told = {"options": words, "machine": machine(), "load": os.getloadavg()[0], "runs": found}
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")
    for name, svg in plots(found).items():
        (ROOT / "docs" / name).write_text(svg)


def plots(found: list[dict[str, Any]]) -> dict[str, str]:
    """The pictures, by name."""
    (memory, *under), made = found, dict[str, str]()
    for name, key, scale, label in (
        ("memory-seconds.svg", "step_s", 1.0, "seconds of a step"),
        ("memory-peaks.svg", "peak_bytes", 1e6, "peak of a worker, MB"),
    ):
        points = [(run["budget_bytes"] / 1e6, run[key] / scale) for run in under]
        ends = points[0][0], points[-1][0]
        lines = {"under the budget": points, "in memory": [(at, memory[key] / scale) for at in ends]}
        if scale > 1:
            lines["the budget"] = [(at, at) for at in ends]
        highest = 1.1 * max(y for line in lines.values() for _, y in line)
        chart = Chart(label, ends, (0.0, highest), "budget, MB", label, names=list(lines))
        for number, line in enumerate(lines.values()):
            chart.line(line, f"c{number}")
        chart.end_labels([(told, f"c{number}", line[-1]) for number, (told, line) in enumerate(lines.items())])
        made[name] = alone(chart.svg())
    return made


def options_of(words: list[str], prefix: str, *, without: bool = False) -> list[str]:
    """Those of the options, each with its value, that begin with a prefix; or the others."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return [word for pair in pairs if pair[0].startswith(prefix) != without for word in pair]


LAB = ["lab", "--nodes", "4", "--rate", "100mbit", "--"]
QUIET = ["--sample-tokens", "0", "--checkpoint-every", "0"]


def trained(
    folder: Path, words: list[str], *, lab: bool = False, keep: str = "run"
) -> tuple[dict[str, Any], list[dict]]:
    """The summary and the steps of a run, which stays in the folder under its name."""
    run_dir = folder / keep
    command = [sys.executable, "-m", "thinwire", *(LAB if lab else []), *(["thinwire"] if lab else []), "train"]
    call([*command, *words, *QUIET, "--run-dir", str(run_dir), "--overwrite"])
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return json.loads((run_dir / "summary.json").read_text()), steps


def call(command: list[str]) -> None:
    """Run a command; raises TooLong, and SystemExit with the end of its output where it fails."""
    with tempfile.TemporaryFile("w+") as out:
        with started(command, out) as process:
            process.wait()
        if process.returncode:
            out.seek(0)
            raise SystemExit(out.read()[-4000:])


def print_links(folder: Path, asked: argparse.Namespace) -> None:
    """Tokens per second on four slow links: sdp4bit in memory and on a disk, and weights that are cut."""
    model, steps, store = asked.model or "demo", asked.steps, asked.store
    common = ["--model", model, "--local-size", "1", "--micro-batch", "1", "--steps", str(steps)]
    common += ["--eval-sequences", "0"]
    on_disk = ["--store", store, "--residency.optimizer", "disk"]
    cut = ["--frontier.weights-over", "4", "--frontier.gradients-over", "4", "--frontier.weights", "bf16"]
    ways = {
        "in memory": ["--strategy", "sdp4bit"],
        "on a disk": ["--strategy", "sdp4bit", *on_disk, "--residency.weights", "disk"],
        "cut over ranks in bf16": ["--strategy", "frontier", *cut, *on_disk],
    }
    rates = {}
    for way, words in ways.items():
        _, found = trained(folder, [*common, *words], lab=True)
        # Tokens of a step are counted from the start.
        rates[way] = found[0]["tokens"] / median(step["step_s"] for step in found[WARM_UP:])
        print(f"{way}: {rates[way]:.1f} tokens/s", flush=True)
    for way in ("in memory", "cut over ranks in bf16"):
        print(f"  on a disk over {way}: {rates['on a disk'] / rates[way]:.2f}")


def print_optimizers(folder: Path, asked: argparse.Namespace) -> None:
    """Held-out losses over AdamW's, and what Mini's sums send."""
    steps, seeds = asked.train_steps, asked.seeds
    text, needed = folder / "text.txt", steps // 2 * 8 * 256
    content = b"".join(path.read_bytes() for path in sorted(Path(json.__file__).parents[1].glob("*.py")))
    # Half of the steps pass through the text once.
    text.write_bytes(content[: max(needed, 20_000)])
    common = ["--model", "tiny", "--workers", "2", "--local-size", "1", "--strategy", "sdp4bit", "--micro-batch", "4"]
    ways = {
        "adamw": [], "apollo": ["--optimizer", "apollo"], "apollo-mini": ["--optimizer", "apollo-mini"],
        "int8 moments": ["--store", str(folder / "store"), "--residency.states", "int8/64"],
        "sample:0.3": ["--activations", "sample:0.3"],
    }  # fmt: skip
    best: dict[str, float] = {}
    sent: dict[str, dict[str, float]] = {}
    for way, words in ways.items():
        losses = []
        for rate in asked.apollo_lrs if way.startswith("apollo") else asked.lrs:
            own = []
            for seed in range(seeds):
                own_words = [*common, "--steps", str(steps), "--lr", rate, "--seed", str(seed), "--data", str(text)]
                summary, _ = trained(folder, [*own_words, *words])
                own.append(summary["heldout_loss"])
                sent[way] = summary["sent_by"]
            losses.append(sum(own) / seeds)
        best[way] = min(losses)
        print(f"{way}: held-out loss {best[way]:.4f}, {best[way] / best['adamw']:.4f} of AdamW's", flush=True)
    sums = sum(num for name, num in sent["apollo-mini"].items() if name not in sent["adamw"])
    print(f"Mini's sums: {sums / sum(sent['adamw'].values()):.4f} of sdp4bit's bytes")


def print_expanded(folder: Path, asked: argparse.Namespace) -> None:
    """At which share of the tokens an expanded model has the loss of one from scratch."""
    steps = asked.train_steps
    common = ["--workers", "2", "--local-size", "1", "--strategy", "sdp4bit", "--micro-batch", "4", "--lr", "0.003"]
    small, large = str(folder / "small"), str(folder / "large")
    _, own = trained(folder, ["--model", "tiny", *common, "--steps", str(steps)], keep="small")
    grown = ["--hidden-size", "128", "--layers", "6", "--sequences", "2"]
    call([sys.executable, "-m", "thinwire", "expand", small, "--to", large, *grown])
    sizes = [f"--llama.{name}" for name in ("hidden-size", "num-hidden-layers", "num-attention-heads")]
    whole = [word for pair in zip(sizes, ("128", "6", "8"), strict=True) for word in pair]
    whole += ["--llama.num-key-value-heads", "4", "--llama.intermediate-size", "384"]
    _, scratch = trained(folder, ["--model", "tiny", *common, *whole, "--steps", str(steps)])
    _, expanded = trained(folder, ["--model", f"hf:{large}", *common, "--steps", str(steps)])
    target = smoothed(scratch)[-1]
    reached = [number for number, loss in enumerate(smoothed(expanded), 1) if number >= WINDOW and loss <= target]
    share = f"{reached[0] / steps:.2f}" if reached else "more than 1"
    print(f"loss {target:.4f} from scratch: the expanded model has it at {share} of the tokens")
    print(
        f"  behind as many tokens it has {smoothed(expanded)[-1]:.4f}; the small one ended at {smoothed(own)[-1]:.4f}"
    )


def smoothed(steps: list[dict[str, Any]]) -> list[float]:
    """The mean loss of the last WINDOW steps, after each. Batches differ too much for fewer."""
    losses = [step["loss"] for step in steps]
    return [sum(losses[max(0, end - WINDOW) : end]) / min(WINDOW, end) for end in range(1, len(losses) + 1)]


PARTS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "budget": print_budget, "plot": write_plot, "links": print_links, "optimizers": print_optimizers,
    "expanded": print_expanded,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true")
    parser.add_argument("--most-minutes", type=float, default=MOST_MINUTES[0], help="of one run")
    parser.add_argument("--model", help="by default 125m, and demo for links")
    parser.add_argument("--memory", default="900mb")
    parser.add_argument("--budgets", nargs="+", default=["900mb", "1200mb", "1500mb", "1800mb"])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rates", nargs="*", default=["200MB/s", "400MB/s", "800MB/s"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--store", default="/var/tmp/thinwire")
    parser.add_argument("--train-steps", type=int, default=300, help="of optimizers and expanded")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lrs", nargs="*", default=["0.001", "0.002", "0.004", "0.008"])
    parser.add_argument("--apollo-lrs", nargs="*", default=["0.0025", "0.005", "0.01", "0.02"])
    asked, more = parser.parse_known_args()
    asked.more = more
    if len(more) % 2 or not all(word.startswith("--") for word in more[::2]):
        parser.error(f"{' '.join(more)}: must be options of thinwire train, each with its value")
    if asked.steps <= WARM_UP:
        parser.error(f"--steps {asked.steps}: the first {WARM_UP} are not counted; nearest: {WARM_UP + 1}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    MOST_MINUTES[0] = asked.most_minutes
    wanted = [part for part in PARTS if getattr(asked, part)] or ["budget"]
    with tempfile.TemporaryDirectory(dir=".") as name:
        for part in wanted:
            try:
                PARTS[part](Path(name).absolute(), asked)
            except TooLong as error:
                print(f"{part}: {error}", flush=True)


if __name__ == "__main__":
    main()
