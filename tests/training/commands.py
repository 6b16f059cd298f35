"""Runs of the command line in real processes, with a model that takes milliseconds a step."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.workers import HANG_S, Command, run_command
from thinwire import cli
from thinwire.errors import ConfigError

THINWIRE = [sys.executable, "-m", "thinwire"]
Started: TypeAlias = "Command | subprocess.Popen[str]"


class CommandRunner:
    """Starts `thinwire train` with small settings below one temporary folder; `close` ends what still runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data.txt"
        self.data.write_text("".join(f"line {n} of {n * n} lines\n" for n in range(3000)))
        self._started: list[Started] = []

    def flags(self, name: str, **more: object) -> list[str]:
        small = {
            "model": "tiny", "data": self.data, "cache_dir": self.folder / "cache", "run_dir": self.folder / name,
            "seq_len": 16, "micro_batch": 2, "workers": 2, "steps": 6, "eval_sequences": 4, "sample_tokens": 8,
            "dtype": "fp32", "timeout": 300,
        }  # fmt: skip
        flags = []
        for key, value in (small | more).items():
            flag = f"--{key.replace('_', '-')}"
            flags += [flag] if value is True else [flag, str(value)] if value is not None else []
        return flags

    def start(self, *command: str) -> Command:
        """`thinwire COMMAND`, forked from a process that has loaded what it needs."""
        self._started.append(process := Command(command, self.folder, {**os.environ, "OMP_NUM_THREADS": "1"}))
        return process

    def popen(self, *command: str) -> subprocess.Popen[str]:
        """Any program; one that begins with THINWIRE loads for seconds."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._started.append(process)
        return process

    def train(self, name: str, **more: object) -> Command:
        return self.start("train", *self.flags(name, **more))

    def ranks(self, name: str, *words: str, num_ranks: int = 2, resumes: bool = False, **more: object) -> str:
        """What the ranks of a run printed that torchrun seems to start; a launcher and its workers take far longer.

        Raises WorkerFailed.
        """
        begun = ["--run-dir", str(self.folder / name), "--resume"]
        flags = begun if resumes else self.flags(name, workers=None, **more)
        printed = self.folder / f"{name}.printed"
        printed.unlink(missing_ok=True)
        run_command(["train", *flags, *words], num_ranks, printed)
        return printed.read_text()

    def again(self, name: str) -> list[str]:
        """The command that goes on with a run."""
        return ["train", "--run-dir", str(self.folder / name), "--resume"]

    def metrics(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name / "summary.json").read_text())

    def await_steps(self, name: str, process: Started, num_steps: int = 3) -> None:
        """Return when so many lines are in a run's metrics; see `await_that`."""
        self.await_that(lambda: len(self.metrics(name)) >= num_steps, process)

    def await_that(self, holds: Callable[[], bool], process: Started) -> None:
        """Return when something holds; fails with all that the command and its workers have said if it ends before."""
        due = time.monotonic() + HANG_S
        while True:
            is_over = process.poll() is not None or time.monotonic() > due
            if holds():
                return
            if is_over:
                raise AssertionError(self.told_by(process))
            time.sleep(0.1)

    def told_by(self, process: Started) -> str:
        """The exit code of a command, which is ended if it still runs, what it has printed, and its workers' logs."""
        code = process.poll()
        if code is None:
            process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
        logs = {str(path.relative_to(self.folder)): path.read_text() for path in sorted(self.folder.rglob("logs/*"))}
        parts = {"stdout": out, "stderr": err, **logs}
        told = [f"--- {name}\n{text[-8000:]}" for name, text in parts.items() if text]
        return "\n".join([f"exit code {'none, it still ran' if code is None else code}", *told])

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
            if isinstance(process, Command):
                process.close()


def train_ranks(folder: Path, name: str, num_ranks: int, flags: Sequence[str], origin: str = "") -> dict[str, Any]:
    """A run of ranks that torchrun seems to start: its summary, its metrics by step, what it printed and its folder.

    origin: the run whose checkpoint it resumes.
    """
    run_dir, text, log = folder / name, folder / "text.txt", folder / f"{name}.log"
    text.write_text("".join(f"def f{n}(x):\n    return x * {n} + {n % 7}\n" for n in range(600)))
    if origin:
        shutil.copytree(folder / origin, run_dir)
        flags = (*flags, "--resume")
    place = ("--data", str(text), "--cache-dir", str(folder / "cache"), "--run-dir", str(run_dir))
    run_command(["train", *place, *flags], num_ranks, log)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = {line["step"]: line for line in lines if "event" not in line}
    return summary | {"steps": steps, "printed": log.read_text(), "folder": run_dir}


class RunsOfRanks(dict[str, dict[str, Any]]):
    """Runs by name, see train_ranks; each is trained when it is asked for first.

    rows: by name the number of ranks, the flags, and the run whose checkpoint it resumes, if any.
    """

    def __init__(self, folder: Path, rows: Mapping[str, tuple[int, str, str]], flags: Sequence[str]) -> None:
        self.folder, self.rows, self.flags = folder, rows, flags

    def __missing__(self, name: str) -> dict[str, Any]:
        num_ranks, flags, origin = self.rows[name]
        if origin:
            self[origin]
        self[name] = train_ranks(self.folder, name, num_ranks, [*self.flags, *flags.split()], origin)
        return self[name]


def check_refused(folder: Path, flags: Sequence[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`thinwire train` with these flags says `message` before a process starts, and leaves no folder."""

    def refuse(*_: object) -> None:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr("thinwire.launch.agent.make_agent", refuse)
    (folder / "text.txt").write_text("text " * 4000)
    place = ["--data", str(folder / "text.txt"), "--run-dir", str(folder / "run")]
    with pytest.raises(ConfigError, match=message):
        cli.run(["train", *place, *flags])
    assert not (folder / "run").exists()


def finish(process: Started) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that ends by itself."""
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode is not None
    return process.returncode, out, err


def workers_of(pid: int) -> list[int]:
    """The workers of a launcher: what the process has forked that it forks them from."""
    (server,) = children(pid)
    return children(server)


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that have not ended, in order of their start."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
