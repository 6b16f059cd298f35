"""Makes every step outlive this process: what the disk does not hold yet is written after each step."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from thinwire.checkpoint import CheckpointError, Snapshot, Source, verify
from thinwire.checkpoint.folder import MANIFEST, Manifest
from thinwire.checkpoint.parts import part_of, sync_folder
from thinwire.checkpoint.saver import write_part
from thinwire.collectives import Communicator
from thinwire.errors import ConfigError, ThinwireError
from thinwire.table import Row

# Name of what masters and states need to go on, in a rank's own state.
SHELF = "shelf"
# Name of what a run is known by, there too.
RUN = "run"
# Folders that hold a step in turn.
TURNS = ("a", "b")


class Keeps(Protocol):
    """Masters and states on a disk, in two slots; see Shelf."""

    def go_on(self, kept: Mapping[str, Any]) -> None:
        """Continue from what was kept. Raises ThinwireError where that can't be."""
        ...

    def begin_anew(self) -> None:
        """Forget what was kept."""
        ...


class Journal:
    """The last steps of this rank, in a folder on its disk.

    A step is a checkpoint with this rank's part alone, and without masters and states, which lie in two slots. Two of
    them take turns, as the slots do. The agreement of all ranks on a gradient's norm is also the word that they
    have written the step before: an older one is overwritten only after that. So whenever a process is killed, one step
    is complete on the disks of all ranks.

    Each step carries the number of its run, which all ranks share: steps of another run that lie in the folder of one
    rank are never taken for this run's. While a process has the folder, no other can use it.

    Attributes:
        found: the step from which all ranks go on; None: none.
        by: what a run must have in common with this one to be continued: its seed and its optimizer.
        row: what became of it.
    """

    def __init__(self, folder: Path, comm: Communicator) -> None:
        self.comm, self.folder = comm, folder / f"rank{comm.rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = locked(self.folder)
        self.by: Mapping[str, Any] = {}
        self._run = secrets.randbits(62)
        self._newest: Path | None = None
        self._is_single = False
        self.found: Source | None = None
        self.row: Row = ("durable", f"every step, in {self.folder}", "a killed run goes on behind its last step")

    def find(self, states: Keeps, layout: Mapping[str, Any]) -> Source | None:
        """Let masters and states go on from the last step that all ranks have written. A collective."""
        there, why = dict[tuple[int, int], Source](), ""
        for folder in self._written():
            try:
                source = Source(folder, self.comm.rank)
                if not source.fits(layout):
                    raise CheckpointError("another layout has written it")
                self._check(source.own(RUN) or {})
                verify(folder)
                states.go_on(source.own(SHELF))
                there[source.manifest.step, source.own(RUN)["number"]] = source
            except ThinwireError as error:
                why = str(error)
        told = torch.full((len(TURNS) + 1, 2), -1)
        told[: len(there)] = torch.tensor([*there]).view(-1, 2)
        # A new run has the number that the first rank has drawn.
        told[-1, 1] = self._run
        all_told = self.comm.wait(self.comm.all_gather_exact(told)).tolist()
        everyone = [{(step, run) for step, run in steps if step >= 0} for steps in all_told]
        common = set.intersection(*everyone)
        if not common:
            if set.union(*everyone) or why:
                self.row = ("durable", "begins anew", why or "no step is on the disks of all ranks")
            self._run = all_told[0][-1][1]
            states.begin_anew()
            return None
        step, self._run = max(common)
        self.found = there[step, self._run]
        self._newest = self.found.folder
        self.row = (
            "durable", f"goes on behind step {step}", f"{self.folder} holds it; optimizer.journal.delete() gives it up"
        )  # fmt: skip
        states.go_on(self.found.own(SHELF))
        return self.found

    def _check(self, run: Mapping[str, Any]) -> None:
        """Raise CheckpointError for the step of a run that this one does not continue."""
        if "number" not in run:
            raise CheckpointError("another version of thinwire has written it")
        for what, own in self.by.items():
            if run[what] != own:
                raise CheckpointError(f"a run of {what} {run[what]} has written it, and this one has {own}")

    def write(self, step: int, snapshot: Snapshot, about: Mapping[str, Any]) -> None:
        """Write a step. Raises OSError if the disk fails."""
        rank = self.comm.rank
        folder = next(self.folder / turn for turn in TURNS if self.folder / turn != self._newest)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        snapshot.own[RUN] = {"number": self._run, **self.by}
        text, pieces = snapshot.to_json(rank)
        files = write_part(part_of(folder, rank), text, pieces)
        sums = {name: list(size) for name, size in files.items()}
        Manifest(step, None, self.comm.world_size, [[rank]], sums, dict(about)).write(folder)
        self._newest, self._is_single = folder, False

    def forget_older(self) -> None:
        """Give up all steps but the newest, whose other slots are about to be overwritten."""
        if self._is_single:
            return
        for folder in self._written():
            if folder != self._newest:
                with suppress(OSError):
                    (folder / MANIFEST).unlink()
                sync_folder(folder)
        self._is_single = True

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    def delete(self) -> None:
        """Free the space of all steps."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()

    def _written(self) -> Iterator[Path]:
        yield from (self.folder / turn for turn in TURNS if (self.folder / turn / MANIFEST).exists())


def locked(folder: Path) -> TextIO:
    """A file that keeps other processes from the folder as long as it is open.

    Raises ConfigError if another process has it.
    """
    file = (folder / "lock").open("a+")
    try:
        # Of this process alone: one that it has forked does not keep it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        pid = file.read()
        file.close()
        raise ConfigError(
            f"store {folder}: {f'process {pid}' if pid else 'a process'} of a run that goes on is using it; nearest: "
            "wait until it has ended, or end it; another run needs a store of its own"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
