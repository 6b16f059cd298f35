"""The run directory: where every file lies, and the rule that starting a run never destroys another."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from zlib import crc32

from thinwire.errors import ConfigError, near_folder, nearest, unusable_folder


class RunDir:
    """Paths inside a run directory.

    Several machines may share one, so nodes from 1 on have a config file of their own.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics, self.summary = self.path / "metrics.jsonl", self.path / "summary.json"
        self.machine, self.plan = self.path / "machine.json", self.path / "plan.json"
        # What the stages of a pipeline did in one step, beside what was predicted.
        self.timeline = self.path / "timeline.json"
        self.trace = self.path / "plan-trace.json"
        self.report, self.checkpoints = self.path / "report.html", self.path / "checkpoints"
        self.logs = self.path / "logs"
        # What does not fit in memory; by default.
        self.store = self.path / "store"
        # Names the other folders in which the run has kept its steps.
        self.durable = self.path / "durable-stores.txt"
        # What befell workers that have no terminal, on purpose.
        self.faults = self.logs / "faults.log"

    def config(self, node: int = 0) -> Path:
        return self.path / ("config.toml" if node == 0 else f"config.node{node}.toml")

    def own_store(self, store: str | Path) -> Path:
        """The folder of this run in a store, in which steps of several runs may lie."""
        path = self.path.absolute()
        return Path(store).absolute() / f"{path.name}-{crc32(str(path).encode()):08x}"

    def durable_stores(self) -> list[Path]:
        """The folders of this machine in which the run has kept its steps, or may have."""
        noted = self.durable.read_text().splitlines() if self.durable.exists() else []
        # A copy of a run directory has no right to the original's.
        return [self.store, *(path for path in map(Path, noted) if path == self.own_store(path.parent))]

    def note_store(self, store: Path) -> None:
        """Remember a folder in which the run keeps its steps."""
        if store.absolute() not in [path.absolute() for path in self.durable_stores()]:
            with self.durable.open("a") as file:
                file.write(f"{store.absolute()}\n")

    def island(self, number: int) -> RunDir:
        """The folder of an island: for the first one this folder, for the others a subfolder."""
        return self if number == 0 else RunDir(self.path / f"island-{number}")

    def check(self, node: int, *, resume: bool, overwrite: bool) -> None:
        """Raise ConfigError if this run can't be written, or would overwrite another run without --overwrite."""
        if why := unusable_folder(self.path):
            raise ConfigError(f"--run-dir {self.path}: {why}{near_folder(self.path)}")
        if self.holds_run(node) and not (resume or overwrite):
            raise ConfigError(
                f"--run-dir {self.path} already holds a run: add --resume to go on with it, --overwrite to delete it, "
                f"or choose another folder, such as {self.next_free()}"
            )
        if resume and not self.holds_run(node):
            above = next(path for path in self.path.absolute().parents if path.exists())
            runs = [os.path.relpath(path) for path in above.iterdir() if RunDir(path).holds_run(node)]
            hint = nearest(os.path.relpath(self.path), runs) if runs else ""
            raise ConfigError(f"--resume: --run-dir {self.path} holds no run to go on with{hint}")

    def holds_run(self, node: int = 0) -> bool:
        marks = [self.config(node)] if node else [self.config(), self.metrics, self.summary, self.checkpoints]
        return any(mark.exists() for mark in marks)

    def next_free(self) -> Path:
        """The run directory's name with the first free number."""
        number = 2
        while (free := self.path.with_name(f"{self.path.name}-{number}")).exists():
            number += 1
        return free

    def claim(self, node: int, config: str, *, overwrite: bool) -> None:
        """Make the folder, delete the old run if asked, and write the configuration."""
        try:
            if overwrite:
                self.delete(node)
            self.logs.mkdir(parents=True, exist_ok=True)
            self.write_config(node, config)
        except OSError as error:
            raise ConfigError(f"--run-dir {self.path} can't be written: {error}") from None

    def write_config(self, node: int, config: str) -> None:
        """Write the configuration. Other ranks may read it at any time, and find the old one or the new one, whole."""
        path = self.config(node)
        draft = path.with_name(f".{path.name}.tmp")
        draft.write_text(config)
        draft.replace(path)

    def delete(self, node: int) -> None:
        """Delete a run's files, and nothing else in the folder."""
        own = [self.metrics, self.summary, self.report, self.machine, self.plan, self.trace, self.timeline, self.logs]
        shared = [*own, *self.path.glob("island-*")] if node == 0 else []
        for path in (*shared, self.config(node), self.checkpoints, *self.durable_stores(), self.durable):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
