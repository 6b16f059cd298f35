"""What the record holds, computed from the code as it is: the suites' strategies and reductions, and whole runs.

An entry is a name, such as `strategy/zero/4x2`, bytes, which every machine sends alike, and bits, which depend on the
machine's arithmetic. Entries that share a start of the processes are a group.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import thinwire
from tests.conformance import reduction_suite, strategy_suite
from tests.golden.arithmetic import digest, fingerprint
from tests.workers import run_command, run_rows, run_workers
from thinwire.methods.own_pace.base import OwnPaceMethod
from thinwire.registry import class_of

STEPS = 20
# The optimizers that the suites train with.
OPTIMIZERS = ("adamw", "sgd", "dgc-sgd", "onebit-adam", "adagrad", "amsgrad")

# Runs of the command line: ranks and ranks per node, and whose checkpoint a run goes on from.
SESSIONS = {"saved": (2, 1, None), "resumed": (2, 1, "saved"), "wider": (4, 2, "saved"), "back": (2, 1, "wider")}
# One strategy of each host and each kind of memory is resumed; tests/checkpoint holds all strategies' states.
RESUMED = ("sdp4bit", "zero-compressed", "powersgd", "lgreco-dgc", "onebit-adam", "zeropp", "frontier", "diloco")
# Steps before the checkpoint: enough for what begins late by default. After it come as many as AFTER.
LATE = {"powersgd": 12, "powersgd-torch": 12, "lgreco": 22}
# Where the clock decides what a step takes in, no run repeats another.
REPEATABLE = [name for name in thinwire.STRATEGIES if not issubclass(class_of(name), OwnPaceMethod)]
BEFORE = {name: LATE.get(name, LATE.get(name.split("-")[0], 4)) for name in thinwire.STRATEGIES}
AFTER = 3
# By default islands exchange more rarely than these runs have steps.
ISLANDS = ("diloco", "streaming-diloco", "local-sgd", "sparseloco", "muloco")
OPTIONS = {name: (f"--{name.replace('-', '')}.sync-every", "2") for name in ISLANDS}
SMALL = (
    "--model", "tiny", "--seq-len", "16", "--micro-batch", "2", "--tokens-per-step", "128", "--lr", "0.003",
    "--dtype", "fp32", "--eval-sequences", "8", "--sample-tokens", "0", "--timeout", "120",
)  # fmt: skip
# What the ranks tell each other of a step may still be on its way when the step ends, and count in the next one: the
# bytes of a run's steps are equal but for two such words, of 24 bytes to each of three others.
LOOSE_BYTES = 144


@dataclass(frozen=True)
class Found:
    bytes: dict[str, Any]
    bits: Any

    def sends_as(self, recorded: dict[str, Any]) -> bool:
        """Whether the bytes are those recorded; those of a run's steps, or of all of it, within LOOSE_BYTES."""
        if self.bytes.keys() != recorded.keys() or not {"steps", "total"} & recorded.keys():
            return self.bytes == recorded
        (ours,), (theirs,) = self.bytes.values(), recorded.values()
        off = [abs(a - b) for a, b in zip(ours, theirs, strict=False)]
        return len(ours) == len(theirs) and max(off) <= LOOSE_BYTES


# Takes the names of the entries that are wanted, and gives what tells each by its name.
Compute = Callable[[Sequence[str]], Callable[[str], Found]]


@dataclass(frozen=True)
class Group:
    """Entries that share a start of the processes."""

    names: tuple[str, ...]
    compute: Compute


def groups() -> list[Group]:
    found = [Group(tuple(f"alone/{name}" for name in OPTIMIZERS), _alone)]
    grids = sorted({grid for row in strategy_suite.ROWS.values() for grid in row.grids})
    for grid in grids:
        names = [name for name, row in strategy_suite.ROWS.items() if grid in row.grids]
        found.append(Group(tuple(strategy_entry(name, grid) for name in names), _strategies(grid)))
    for grid in sorted({row.grid for row in reduction_suite.ROWS.values()}):
        names = [name for name, row in reduction_suite.ROWS.items() if row.grid == grid]
        found.append(Group(tuple(f"reduction/{name}/{_shown(grid)}" for name in names), _reductions(grid)))
    for name in REPEATABLE:
        sessions = SESSIONS if name in RESUMED else ["saved"]
        found.append(Group(tuple(f"trainer/{name}/{session}" for session in sessions), _runs))
    return found


def machine() -> str:
    """The fingerprint of a rank's arithmetic."""
    return run_workers(_fingerprint, 1, has_group=False)[0]


def _fingerprint(rank: int, world_size: int) -> str:
    return fingerprint()


def _shown(grid: tuple[int, int]) -> str:
    """Nodes x ranks of a node, for (world size, ranks of a node)."""
    return f"{grid[0] // grid[1]}x{grid[1]}"


def _alone(names: Sequence[str]) -> Callable[[str], Found]:
    rows = run_rows(_single_process, [name.split("/")[1] for name in names], 1)
    return lambda name: Found({}, rows.of(name.split("/")[1])[0])


def _single_process(rank: int, world_size: int, kind: str) -> str:
    return digest(strategy_suite.single_process(kind))


def strategy_entry(name: str, grid: tuple[int, int]) -> str:
    """The entry of a row of the suite of strategies."""
    return f"strategy/{name}/{_shown(grid)}"


def trained(told: Sequence[dict[str, Any]]) -> Found:
    """What such an entry holds, from what the ranks told that the suite has trained."""
    sent = [_sent(one["reading"]) for one in told]
    return _of_ranks([(digest(one["weights"]), "", each, one["formula"]) for one, each in zip(told, sent, strict=True)])


def _strategies(grid: tuple[int, int]) -> Compute:
    def compute(names: Sequence[str]) -> Callable[[str], Found]:
        told = run_rows(strategy_suite.train, [name.split("/")[1] for name in names], grid[0], grid[1])
        return lambda name: trained(told.of(name.split("/")[1]))

    return compute


def _reductions(grid: tuple[int, int]) -> Compute:
    def compute(names: Sequence[str]) -> Callable[[str], Found]:
        told = run_rows(_reduction, [name.split("/")[1] for name in names], grid[0], grid[1], local_size=grid[1])
        return lambda name: _of_ranks(told.of(name.split("/")[1]))

    return compute


def _of_ranks(told: Sequence[tuple[str, str, Any, int]]) -> Found:
    """From each rank: the digest of what is equal on all ranks, that of what is the rank's own (empty: nothing is), the
    bytes sent and those promised for a step."""
    equal, own, sent, promised = zip(*told, strict=True)
    assert len(set(equal)) == 1, "replicas differ"
    return Found({"sent": _shared(sent), "promised": _shared(promised)}, _shared((equal[0], *filter(None, own))))


def _shared(values: Sequence[Any]) -> Any:
    """One value where all ranks have the same, else a list in rank order."""
    return values[0] if all(value == values[0] for value in values) else list(values)


def _reduction(rank: int, world_size: int, name: str, local_size: int) -> tuple[str, str, Any, int]:
    harness = reduction_suite.Harness(reduction_suite.ROWS[name], rank)
    meter = harness.handle.meter
    before = meter.snapshot()
    outs = {f"{step:02} {key}": out for step in range(STEPS) for key, out in harness.put(step).items()}
    sent = _sent(meter.snapshot() - before)
    weights = {f"weights {key}": weight for key, weight in harness.model.named_parameters()}
    residuals = digest(harness.residuals())
    promised = harness.handle.bytes_per_step
    harness.close()
    return digest(outs | weights), residuals, sent, promised


def _sent(reading: Any) -> dict[str, int]:
    """Payload bytes by operation and level."""
    operations = {f"{name}/{level}": each.sent_bytes for (name, level), each in reading.operations.items()}
    return {key: num_bytes for key, num_bytes in sorted(operations.items()) if num_bytes}


def _runs(names: Sequence[str]) -> Callable[[str], Found]:
    strategy = names[0].split("/")[1]
    wanted = {name.split("/")[2] for name in names}
    # With each session those before it that it goes on from.
    for name in reversed(SESSIONS):
        if name in wanted and (origin := SESSIONS[name][2]):
            wanted.add(origin)
    with tempfile.TemporaryDirectory() as folder:
        told = {name: _run(Path(folder), strategy, name) for name in SESSIONS if name in wanted}
    return lambda name: told[name.split("/")[2]]


def _run(folder: Path, strategy: str, session: str) -> Found:
    num_ranks, local_size, origin = SESSIONS[session]
    run_dir, before = folder / session, BEFORE[strategy]
    place = ["--run-dir", run_dir, "--workers", num_ranks, "--local-size", local_size]
    if origin is None:
        text = folder / "data.txt"
        text.write_text("".join(f"line {n} of {n * n} lines\n" for n in range(300)))
        data = ["--data", text, "--cache-dir", folder / "cache", "--strategy", strategy, *OPTIONS.get(strategy, ())]
        flags = [*SMALL, *data, "--steps", before + AFTER, "--stop-at", before]
        first = 0
    else:
        shutil.copytree(folder / origin, run_dir)
        first = before if SESSIONS[origin][2] is None else before + AFTER
        flags = ["--resume", "--steps", first + AFTER]
    run_command(["train", *map(str, [*place, *flags])], num_ranks, folder / f"{session}.log")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("step", 0) > first]
    summary = json.loads((run_dir / "summary.json").read_text())
    # An exchange goes on beside training: in which step its bytes are counted, or after the last, is up to the clock.
    total = {"total": [summary["sent_bytes"]]}
    sent = total if strategy in ISLANDS else {"steps": [line["sent_bytes"] for line in steps]}
    bits = {"loss": [line["loss"] for line in steps], "norm": [line["grad_norm"] for line in steps]}
    return Found(sent, bits | {"heldout": summary["heldout_loss"]})


def is_covered(name: str) -> bool:
    """Whether others hold what this entry could show: a run of a class that another strategy runs, or a row that has
    the jobs of another, and the grid of a third. What their codecs compute is held by the codecs' suite."""
    kind, row, *_ = name.split("/")
    if kind == "reduction":
        own = reduction_suite.ROWS[row]
        return own.variant and row != next(key for key, other in reduction_suite.ROWS.items() if other.grid == own.grid)
    if kind != "trainer" or row in RESUMED:
        return False
    like = [other for other in REPEATABLE if class_of(other) is class_of(row)]
    return like[0] != row or any(other in RESUMED for other in like)


def everything() -> Iterator[str]:
    """The names of all entries."""
    return itertools.chain.from_iterable(group.names for group in groups())
