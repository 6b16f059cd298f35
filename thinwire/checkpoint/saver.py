"""Saves checkpoints in the background: copied at once, written by a thread, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.checkpoint.folder import Keep, Manifest, folder_of, leftovers, note_next_loss, point_to
from thinwire.checkpoint.parts import METADATA, part_of, sync_folder
from thinwire.checkpoint.state import Piece, Snapshot

if TYPE_CHECKING:
    # It loads torch.distributed.checkpoint and numba, which a refused command should not wait for.
    from thinwire.checkpoint.dcp import FileSums

POLL_S = 0.02
# Let the training thread return to tensors first: both need the interpreter, which switches only every 5 ms.
HEAD_START_S = 0.01
GatherNumbers = Callable[[int], list[int]]


@dataclass(frozen=True)
class Disk:
    """The disk that this rank writes to, and the ranks that share it.

    firsts: for each rank, the lowest rank whose files lie on the same disk.
    """

    rank: int
    firsts: tuple[int, ...]

    @property
    def ranks(self) -> list[int]:
        """Ranks that share this rank's disk."""
        return [rank for rank, first in enumerate(self.firsts) if first == self.firsts[self.rank]]

    @property
    def is_leader(self) -> bool:
        """Whether this rank completes the checkpoints on its disk."""
        return self.firsts[self.rank] == self.rank

    @property
    def leaders(self) -> list[int]:
        return sorted(set(self.firsts))

    @property
    def groups(self) -> list[list[int]]:
        """Ranks grouped by disk."""
        return [[rank for rank, first in enumerate(self.firsts) if first == leader] for leader in self.leaders]

    @classmethod
    def find(cls, folder: Path, rank: int, gather: GatherNumbers) -> Disk:
        """Find which ranks share a disk: each leaves a file, then looks for the others' files. A collective.

        Also deletes the remains of interrupted saves. gather: returns one number from every rank, in rank order.
        """
        folder.mkdir(parents=True, exist_ok=True)
        token = gather(int.from_bytes(os.urandom(4)))[0]
        own = folder / f".disk-{token}-{rank}"
        own.touch()
        world_size = len(gather(0))
        first = next(r for r in range(world_size) if (folder / f".disk-{token}-{r}").exists())
        if first == rank:
            for path in leftovers(folder):
                shutil.rmtree(path, ignore_errors=True)
        firsts = gather(first)
        own.unlink()
        return cls(rank, tuple(firsts))


def store_of_ranks(rank: int, world_size: int, gather: GatherNumbers) -> dist.Store:
    """A key-value store that lives as long as rank 0. A collective.

    The store in which the ranks met may belong to the launcher. A run must be able to save after its launcher is gone.
    """
    if world_size == 1:
        return dist.HashStore()
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        gather(store.port)
        return store
    return dist.TCPStore(host, gather(0)[0], is_master=False, wait_for_workers=False)


class Saver:
    """Saves this rank's part of each checkpoint. Every rank has one, and all save the same steps in the same order.

    A save that fails leaves earlier checkpoints unchanged; `problems` returns the reason.

    Args:
        store: where ranks report that their part is written. It is polled, so that a slow disk delays nobody.
        keep: which checkpoints stay.
        timeout_s: seconds after which a rank that has not reported is given up.
    """

    def __init__(self, folder: Path, disk: Disk, store: dist.Store, keep: Keep, timeout_s: float) -> None:
        from thinwire.codecs.kernels.crc import crc32

        self.folder, self.disk, self.keep, self.timeout_s = folder, disk, keep, timeout_s
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thinwire-checkpoint")
        # A save that compiles its checksum would hold up the training thread.
        self._thread.submit(crc32, bytes(512))
        self._saving: Future[str] | None = None
        self._staged: dict[str, Tensor] = {}
        # Savers that share a store use keys of their own.
        self._number, self._num_saves = store.add(f"checkpoint/savers/{disk.rank}", 1), 0
        self._is_abandoned = False
        self._problems: list[str] = []
        self.last_step = -1

    def save(self, step: int, snapshot: Snapshot, *, loss: float | None, about: Mapping[str, Any]) -> None:
        """Copy the snapshot and write it in the background. Waits for a save that is still running.

        What is to be written from where it lies is written at once.
        """
        self.wait()
        if step == self.last_step:
            return
        self.last_step = step
        text, pieces = snapshot.to_json(self.disk.rank)
        staged = self._stage(pieces, in_place=snapshot.in_place)
        manifest = Manifest(step, loss, len(self.disk.firsts), self.disk.groups, {}, dict(about))
        self._num_saves += 1
        self._saving = self._thread.submit(
            self._save, manifest, text, staged, f"checkpoint/{self._number}/{self._num_saves}"
        )
        if snapshot.in_place:
            self.wait()

    def note_next_loss(self, loss: float) -> None:
        """Store the loss of the step that follows the last save, on its disk."""
        if self.disk.is_leader:
            self._thread.submit(note_next_loss, folder_of(self.folder, self.last_step), loss)

    def wait(self) -> None:
        """Wait until no save is running."""
        if self._saving is not None:
            self._note(self._saving.result())
            self._saving = None

    def problems(self) -> list[str]:
        """Reasons why saves have failed since the last call."""
        if self._saving is not None and self._saving.done():
            self.wait()
        found, self._problems = self._problems, []
        return found

    def close(self) -> None:
        """Finish a running save and stop."""
        self.wait()
        self._thread.shutdown()

    def abandon(self) -> None:
        """Stop after a loss: a save that waits for other ranks is given up."""
        self._is_abandoned = True
        self._thread.shutdown()

    def _note(self, problem: str) -> None:
        if problem:
            self._problems.append(problem)
            # The same step may be saved again.
            self.last_step = -1

    @torch.no_grad()
    def _stage(self, pieces: Mapping[str, Piece], *, in_place: bool) -> dict[str, Piece]:
        """The pieces that this rank saves; unless `in_place`, copies in memory that is reused by the next save."""
        ranks, before = self.disk.ranks, self._staged
        self._staged, staged = {}, {}
        for name, piece in pieces.items():
            same = [rank for rank in ranks if rank in piece.holders] if piece.holders else ranks
            own = piece.share(same.index(self.disk.rank), len(same))
            if in_place:
                staged[name] = own
                continue
            held = before.get(name)
            if held is None or (held.shape, held.dtype) != (own.values.shape, own.values.dtype):
                held = torch.empty_like(own.values, device="cpu")
            self._staged[name] = held.copy_(own.values)
            staged[name] = replace(own, values=held)
        return staged

    def _save(self, manifest: Manifest, text: dict[str, Any], pieces: dict[str, Piece], key: str) -> str:
        """Write this rank's part, report it, and complete the checkpoint once all have reported.

        Returns the error, or "".
        """
        time.sleep(HEAD_START_S)
        temporary = self.folder / f".step-{manifest.step:08d}.tmp"
        problem = ""
        files: dict[str, Any] = {}
        try:
            files = write_part(part_of(temporary, self.disk.rank), text, pieces)
        except (OSError, RuntimeError) as error:
            problem = f"rank {self.disk.rank}: {error}"
        try:
            problem = self._agree(temporary, manifest, key, problem, files)
        except dist.DistError as error:
            problem = f"rank {self.disk.rank} can't reach the others any more: {error}"
        return f"the checkpoint of step {manifest.step} was not saved: {problem}" if problem else ""

    def _agree(self, temporary: Path, manifest: Manifest, key: str, problem: str, files: Mapping[str, Any]) -> str:
        """Complete the checkpoint once all ranks have reported. Return the error, or ""."""
        self._publish(f"{key}/{self.disk.rank}", {"problem": problem, "files": files})
        told = self._read_all([f"{key}/{rank}" for rank in range(manifest.world_size)])
        problem = next((word["problem"] for word in told if word["problem"]), "")
        if self.disk.is_leader:
            all_files = {name: list(size) for word in told for name, size in word["files"].items()}
            problem = self._complete(temporary, replace(manifest, files=all_files), problem)
            self._publish(f"{key}/done/{self.disk.rank}", {"problem": problem})
        done = self._read_all([f"{key}/done/{leader}" for leader in self.disk.leaders])
        problem = next((word["problem"] for word in done if word["problem"]), "")
        if self.disk.is_leader and not problem:
            # Not earlier: another disk may still have only the checkpoint that this one would delete.
            self.keep.prune(self.folder)
        return problem

    def _complete(self, temporary: Path, manifest: Manifest, problem: str) -> str:
        """Rename a whole checkpoint to its final name, or delete a partial one."""
        try:
            if not problem:
                complete(temporary, manifest)
        except OSError as error:
            problem = f"rank {self.disk.rank}: {error}"
        if problem:
            shutil.rmtree(temporary, ignore_errors=True)
        return problem

    def _publish(self, key: str, word: Mapping[str, Any]) -> None:
        self._store.set(key, json.dumps(word))

    def _read_all(self, keys: list[str]) -> list[dict[str, Any]]:
        """Values that the ranks have published under these keys."""
        due = time.monotonic() + self.timeout_s
        for key in keys:
            while not self._store.check([key]):
                if self._is_abandoned:
                    return [{"problem": "a rank was lost", "files": {}}]
                if time.monotonic() > due:
                    return [{"problem": f"nothing was reported under {key} in {self.timeout_s:g} s", "files": {}}]
                time.sleep(POLL_S)
        return [json.loads(self._store.get(key)) for key in keys]


def write_part(part: Path, text: Mapping[str, Any], pieces: Mapping[str, Piece]) -> FileSums:
    """Write one rank's part. Return {path: (bytes, checksum)} of its files. Raises OSError."""
    from thinwire.checkpoint.dcp import write_pieces

    if part.exists():
        shutil.rmtree(part)
    sums = write_pieces(part, pieces, text)
    return {f"{part.name}/{name}": sums[name] for name in sorted(sums)}


def complete(temporary: Path, manifest: Manifest) -> None:
    """Turn a fully written folder into a checkpoint: manifest, then name, then pointer. Raises OSError."""
    from thinwire.checkpoint.dcp import write_metadata

    folder = folder_of(temporary.parent, manifest.step)
    # Machines with disks of their own have indices of their own.
    manifest = replace(manifest, files={**manifest.files, METADATA: list(write_metadata(temporary))})
    # Which brings to the disk the names in the folder, too.
    manifest.write(temporary)
    replaced = temporary.with_suffix(".old")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    temporary.rename(folder)
    sync_folder(folder.parent)
    point_to(folder)
    shutil.rmtree(replaced, ignore_errors=True)
