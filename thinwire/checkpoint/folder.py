"""A run's folder of checkpoints: which are complete, which are intact, which is the last, which may be deleted.

checkpoints/latest                    the name of the last complete one
checkpoints/step-00000500/            one checkpoint; until it is complete, .step-00000500.tmp
    manifest.json                     step, loss, ranks, versions; size and checksum of all other files
    rank0/state.json, __0_0.distcp    what rank 0 wrote: numbers and the index, and the tensors
    next_loss.json                    the loss of the following step, once it is known
    verified                          the last time that all checksums were found right
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from thinwire.checkpoint.parts import METADATA, CheckpointError, part_of, write_durably
from thinwire.errors import ConfigError, nearest

log = logging.getLogger("thinwire")

POINTER = "latest"
MANIFEST = "manifest.json"
NEXT_LOSS = "next_loss.json"
VERIFIED = "verified"
FORMAT = 1
# Version of the files that hold their own checksum.
SEAL = "checksum"
READ_BYTES = 1 << 22
NAME = re.compile(r"step-(\d{8,})")


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_of(checkpoint: Path | None) -> int:
    """Number of the step after which the checkpoint was taken; 0 for None."""
    return int(checkpoint.name.removeprefix("step-")) if checkpoint else 0


def all_of(checkpoints: Path) -> list[Path]:
    """The complete checkpoints, by step."""
    found = [path for path in checkpoints.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def latest(checkpoints: Path) -> Path | None:
    """The checkpoint that the file `latest` names; the newest one if that file names none."""
    try:
        named = checkpoints / (checkpoints / POINTER).read_text().strip()
    except (OSError, ValueError):
        named = checkpoints
    there = all_of(checkpoints)
    return named if named in there else there[-1] if there else None


def point_to(checkpoint: Path) -> None:
    """Make a checkpoint the last complete one."""
    write_durably(checkpoint.parent / POINTER, checkpoint.name.encode())


def checksum(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def sealed(content: dict[str, Any]) -> bytes:
    """JSON of the content with a CRC-32 of itself."""
    return json.dumps({**content, SEAL: zlib.crc32(json.dumps(content).encode())}, indent=1).encode()


def unsealed(path: Path) -> Any:
    """The content of a file written by `sealed`.

    Raises CheckpointError, ValueError, KeyError or TypeError if the file has changed.
    """
    content = json.loads(path.read_bytes())
    if content.pop(SEAL) != zlib.crc32(json.dumps(content).encode()):
        raise CheckpointError(f"{path} is damaged: its checksum is wrong")
    return content


@dataclass(frozen=True)
class Manifest:
    """The files, ranks and numbers of a complete checkpoint.

    Args:
        disks: groups of ranks that wrote to the same disk; machines may have disks of their own.
        files: {path: [bytes, CRC-32]}.
    """

    step: int
    loss: float | None
    world_size: int
    disks: list[list[int]]
    files: dict[str, list[int]]
    about: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def write(self, folder: Path) -> None:
        write_durably(folder / MANIFEST, sealed({"format": FORMAT, **vars(self)}))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint. Raises CheckpointError if it is missing or damaged."""
        path = folder / MANIFEST
        try:
            content = unsealed(path)
            if content.pop("format") != FORMAT:
                raise CheckpointError(f"{path} was written by another version of thinwire")
            return cls(**content)
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}") from None

    def present(self, folder: Path) -> list[str]:
        """The files that must be in this folder.

        They are the files of each disk that has any file here, and those of all disks if none has.
        """
        here = [rank for disk in self.disks if any(part_of(folder, r).exists() for r in disk) for rank in disk]
        ranks = here or range(self.world_size)
        names = {METADATA, *(part_of(folder, rank).name for rank in ranks)}
        return [name for name in self.files if name.split("/")[0] in names]


def verify(checkpoint: Path) -> Manifest:
    """Check every file against its checksum. Raises CheckpointError with the names of all damaged files.

    If only the index of torch's tools is damaged, it is written again from the other files.
    """
    with suppress(OSError):
        (checkpoint / VERIFIED).unlink()
    manifest = Manifest.read(checkpoint)
    wrong = [problem for name in manifest.present(checkpoint) if (problem := _fault(checkpoint, name, manifest))]
    try:
        next_loss(checkpoint)
    except CheckpointError as error:
        wrong.append(str(error))
    if len(wrong) == 1 and wrong[0].startswith(METADATA):
        # It takes torch, for which a list of checkpoints does not wait.
        from thinwire.checkpoint.dcp import write_metadata

        log.warning("thinwire: %s: %s; it is written anew from the other files", checkpoint, wrong.pop())
        with suppress(OSError):
            write_metadata(checkpoint)
    if wrong:
        raise CheckpointError(f"{checkpoint}: " + "; ".join(wrong))
    with suppress(OSError):
        (checkpoint / VERIFIED).write_text(datetime.now(UTC).isoformat(" ", "seconds"))
    return manifest


def verified_at(checkpoint: Path) -> str:
    """Time of the last `verify` without an error; empty if it never ran, or has found an error since."""
    try:
        return (checkpoint / VERIFIED).read_text()
    except OSError:
        return ""


def _fault(checkpoint: Path, name: str, manifest: Manifest) -> str:
    expected = manifest.files[name]
    try:
        size, crc = checksum(checkpoint / name)
    except OSError as error:
        return f"{name} can't be read ({error.strerror})"
    if size != expected[0]:
        return f"{name} has {size:,} bytes, not {expected[0]:,}"
    return "" if crc == expected[1] else f"{name} is damaged: its checksum is wrong"


def passed_over(checkpoints: Path) -> list[str]:
    """Folders after the last complete checkpoint, each with the reason why a run does not resume from it."""
    last = latest(checkpoints)
    later = [path for path in all_of(checkpoints) if last is not None and step_of(path) > step_of(last)]
    return [
        *(f"{path}: its save was cut short" for path in sorted(checkpoints.glob(".step-*.tmp"))),
        *(f"{path}: {checkpoints / POINTER} names an earlier one" for path in reversed(later)),
    ]


def choose(checkpoints: Path, *, moves_pointer: bool = True) -> tuple[Path | None, list[str]]:
    """The last intact checkpoint, or None if there is no checkpoint, and the faults of later ones.

    Makes that checkpoint the one that `latest` names. Raises CheckpointError if no checkpoint is intact.

    moves_pointer: False where other processes may choose on the same disk.
    """
    last = latest(checkpoints)
    candidates = [last, *(path for path in reversed(all_of(checkpoints)) if last and step_of(path) < step_of(last))]
    wrong: list[str] = []
    for candidate in filter(None, candidates):
        try:
            verify(candidate)
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        if moves_pointer:
            point_to(candidate)
        return candidate, wrong
    if wrong:
        raise CheckpointError("no checkpoint is sound:\n" + "\n".join(wrong))
    return None, []


@dataclass(frozen=True)
class Keep:
    """Rule for which checkpoints stay on disk.

    Args:
        last: keep the newest `last` checkpoints.
        every: above 0, also keep those of the steps that are multiples of `every`.
        best: also keep the one with the least training loss.
    """

    last: int = 2
    every: int = 0
    best: bool = False

    def prune(self, checkpoints: Path) -> None:
        """Delete the checkpoints that the rule does not keep. The last one and any later, unusable ones stay."""
        last = step_of(latest(checkpoints))
        there = [path for path in all_of(checkpoints) if step_of(path) <= last]
        kept = set(there[-self.last :])
        kept |= {path for path in there if self.every and step_of(path) % self.every == 0}
        if self.best and (best := best_of(there)):
            kept.add(best)
        for old in there:
            if old not in kept:
                # A kill during the deletion must not leave half a checkpoint under the name of a complete one.
                with suppress(OSError):
                    old = old.rename(checkpoints / f".{old.name}.old")
                shutil.rmtree(old, ignore_errors=True)


def best_of(checkpoints: Iterable[Path]) -> Path | None:
    """The checkpoint with the least training loss, among those that state a loss."""
    losses: dict[Path, float] = {}
    for path in checkpoints:
        try:
            loss = Manifest.read(path).loss
        except CheckpointError:
            continue
        if loss is not None:
            losses[path] = loss
    return min(losses, key=lambda path: losses[path]) if losses else None


def leftovers(checkpoints: Path) -> Iterator[Path]:
    """Folders left by interrupted saves."""
    yield from checkpoints.glob(".step-*")


def note_next_loss(checkpoint: Path, loss: float) -> None:
    """Store the loss of the step that follows a checkpoint: a resumed run must have the same loss."""
    if checkpoint.is_dir():
        write_durably(checkpoint / NEXT_LOSS, sealed({"loss": loss}))


def next_loss(checkpoint: Path) -> float | None:
    """The loss of the step that follows a checkpoint, if known. Raises CheckpointError if the file is damaged."""
    path = checkpoint / NEXT_LOSS
    try:
        return float(unsealed(path)["loss"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}") from None


def checkpoints_of(place: Path) -> Path:
    """The folder of checkpoints of `place`, a run directory or that folder itself. Raises ConfigError if none."""
    for folder in (place / "checkpoints", place):
        if all_of(folder):
            return folder
    raise ConfigError(
        f"{place} holds no checkpoint: give a run directory, or its folder of checkpoints{nearest_run(place)}"
    )


def nearest_run(place: Path) -> str:
    """Tail of an error message that names a run directory near `place`, which has no checkpoint; empty if none."""
    above = next((path for path in place.parents if path.is_dir()), Path())
    for root in (above, Path()):
        folders = [*root.glob("*/checkpoints"), *root.glob("*/*/checkpoints")]
        if runs := [str(folder.parent) for folder in folders if all_of(folder)]:
            return nearest(str(place), runs)
    return ""
