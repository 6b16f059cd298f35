"""Makes every step outlive this process: what the disk does not hold yet is written after each step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from thinwire.checkpoint import CheckpointError, Snapshot, Source, verify
from thinwire.checkpoint.folder import MANIFEST, Manifest
from thinwire.checkpoint.parts import part_of, sync_folder
from thinwire.checkpoint.saver import write_part
from thinwire.collectives import Communicator
from thinwire.errors import ThinwireError
from thinwire.table import Row
from thinwire.tiers import Shelf

# Name of what the shelf needs to go on, in a rank's own state.
SHELF = "shelf"
# Folders that hold a step in turn.
TURNS = ("a", "b")


class Journal:
    """The last steps of this rank, in a folder on its disk.

    A step is a checkpoint with this rank's part alone, and without what lies in the files of the shelf. Two of them
    take turns, as slots of the shelf do. The agreement of all ranks on a gradient's norm is also the word that they
    have written the step before: an older one is overwritten only after that. So whenever a process is killed, one step
    is complete on the disks of all ranks.

    Attributes:
        found: the step from which all ranks go on; None: none.
        row: what became of it.
    """

    def __init__(self, folder: Path, comm: Communicator) -> None:
        self.comm, self.folder = comm, folder / f"rank{comm.rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._newest: Path | None = None
        self._is_single = False
        self.found: Source | None = None
        self.row: Row = ("durable", f"every step, in {self.folder}", "a killed run goes on behind its last step")

    def find(self, shelf: Shelf, layout: Mapping[str, Any]) -> Source | None:
        """Let the shelf go on from the last step that all ranks have written. A collective."""
        there, why = dict[int, Source](), ""
        for folder in self._written():
            try:
                source = Source(folder, self.comm.rank)
                if not source.fits(layout):
                    raise CheckpointError("another layout has written it")
                verify(folder)
                shelf.go_on(source.own(SHELF))
                there[source.manifest.step] = source
            except ThinwireError as error:
                why = str(error)
        told = torch.full((len(TURNS),), -1)
        told[: len(there)] = torch.tensor(sorted(there))
        everyone = [set(steps) for steps in self.comm.wait(self.comm.all_gather_exact(told)).tolist()]
        common = set.intersection(*everyone) - {-1}
        if not common:
            if set.union(*everyone) - {-1} or why:
                self.row = ("durable", "begins anew", why or "no step is on the disks of all ranks")
            shelf.begin_anew()
            return None
        self.found = there[max(common)]
        self._newest = self.found.folder
        shelf.go_on(self.found.own(SHELF))
        return self.found

    def write(self, step: int, snapshot: Snapshot, about: Mapping[str, Any]) -> None:
        """Write a step. Raises OSError if the disk fails."""
        rank = self.comm.rank
        folder = next(self.folder / turn for turn in TURNS if self.folder / turn != self._newest)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
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

    def delete(self) -> None:
        """Free the space of all steps."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()

    def _written(self) -> Iterator[Path]:
        yield from (self.folder / turn for turn in TURNS if (self.folder / turn / MANIFEST).exists())
