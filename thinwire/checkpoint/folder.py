"""A run's folder of checkpoints: which are complete, which are sound, which one is the last, which may go.

checkpoints/latest                    the name of the last complete one
checkpoints/step-00000500/            one checkpoint; until it is complete, .step-00000500.tmp
    manifest.json                     step, loss, ranks, versions; size and checksum of all other files
    rank0/state.json, __0_0.distcp    what rank 0 wrote: numbers and the index, and the tensors
    next_loss.json                    the loss of the step after it, once that is known
    verified                          when all checksums were last found right
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

from thinwire.checkpoint.dcp import METADATA, CheckpointError, part_of, write_durably, write_metadata
from thinwire.errors import ConfigError, nearest

log = logging.getLogger("thinwire")

POINTER = "latest"
MANIFEST = "manifest.json"
NEXT_LOSS = "next_loss.json"
VERIFIED = "verified"
FORMAT = 1
# Of files that hold their own checksum.
SEAL = "checksum"
READ_BYTES = 1 << 22
NAME = re.compile(r"step-(\d{8,})")


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_of(checkpoint: Path | None) -> int:
    """The step after which the checkpoint was taken; 0 for none."""
    return int(checkpoint.name.removeprefix("step-")) if checkpoint else 0


def all_of(checkpoints: Path) -> list[Path]:
    """The complete checkpoints, by step."""
    found = [path for path in checkpoints.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def latest(checkpoints: Path) -> Path | None:
    """The checkpoint that the pointer names; the newest there is where it names none."""
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
    """(Bytes, CRC-32) of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def sealed(content: dict[str, Any]) -> bytes:
    """JSON with a CRC-32 of the rest of it."""
    return json.dumps({**content, SEAL: zlib.crc32(json.dumps(content).encode())}, indent=1).encode()


def unsealed(path: Path) -> Any:
    """What was sealed. Raises CheckpointError where it is not as it was written; ValueError, KeyError, TypeError."""
    content = json.loads(path.read_bytes())
    if content.pop(SEAL) != zlib.crc32(json.dumps(content).encode()):
        raise CheckpointError(f"{path} is damaged: its checksum is wrong")
    return content


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of.

    disks: the ranks by the disk that they wrote to: machines may have disks of their own. files: {path: [bytes, crc]}.
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
        """Raises CheckpointError where it is missing or damaged."""
        path = folder / MANIFEST
        try:
            content = unsealed(path)
            if content.pop("format") != FORMAT:
                raise CheckpointError(f"{path} is of another version of thinwire")
            return cls(**content)
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}") from None

    def present(self, folder: Path) -> list[str]:
        """The files that must be here: those of every disk of which anything is; of all disks where nothing is."""
        here = [rank for disk in self.disks if any(part_of(folder, r).exists() for r in disk) for rank in disk]
        ranks = here or range(self.world_size)
        names = {METADATA, *(part_of(folder, rank).name for rank in ranks)}
        return [name for name in self.files if name.split("/")[0] in names]


def verify(checkpoint: Path) -> Manifest:
    """Compare every file with its checksum. Raises CheckpointError with the names of all that are wrong.

    The index of torch's tools follows from the other files: where it alone is damaged, it is written anew.
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
        log.warning("thinwire: %s: %s; it is written anew from the other files", checkpoint, wrong.pop())
        with suppress(OSError):
            write_metadata(checkpoint)
    if wrong:
        raise CheckpointError(f"{checkpoint}: " + "; ".join(wrong))
    with suppress(OSError):
        (checkpoint / VERIFIED).write_text(datetime.now(UTC).isoformat(" ", "seconds"))
    return manifest


def verified_at(checkpoint: Path) -> str:
    """When `verify` last found nothing wrong; empty where it never did, or something was since."""
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
    """What lies there beyond the last complete checkpoint, and why nobody goes on from it."""
    last = latest(checkpoints)
    later = [path for path in all_of(checkpoints) if last is not None and step_of(path) > step_of(last)]
    return [
        *(f"{path}: its save was cut short" for path in sorted(checkpoints.glob(".step-*.tmp"))),
        *(f"{path}: {checkpoints / POINTER} names an earlier one" for path in reversed(later)),
    ]


def choose(checkpoints: Path, *, moves_pointer: bool = True) -> tuple[Path | None, list[str]]:
    """The last checkpoint that is sound, to which the pointer points from here on, and what is wrong with later ones.

    None where there is none at all; raises CheckpointError where none is sound. moves_pointer: False where others
    may choose on the same disk.
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
    """What stays: the last `last`; with every > 0 those after its multiples; with `best`, the one of least loss."""

    last: int = 2
    every: int = 0
    best: bool = False

    def prune(self, checkpoints: Path) -> None:
        """Delete what need not stay; never the last, nor later ones, which are damaged or were given up."""
        last = step_of(latest(checkpoints))
        there = [path for path in all_of(checkpoints) if step_of(path) <= last]
        kept = set(there[-self.last :])
        kept |= {path for path in there if self.every and step_of(path) % self.every == 0}
        if self.best and (best := best_of(there)):
            kept.add(best)
        for old in there:
            if old not in kept:
                # A kill in the middle must leave no half of a checkpoint under a whole one's name.
                with suppress(OSError):
                    old = old.rename(checkpoints / f".{old.name}.old")
                shutil.rmtree(old, ignore_errors=True)


def best_of(checkpoints: Iterable[Path]) -> Path | None:
    """The one with the least training loss, of those that say theirs."""
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
    """What saves that were cut short have left behind."""
    yield from checkpoints.glob(".step-*")


def note_next_loss(checkpoint: Path, loss: float) -> None:
    """Keep the loss that the run had in the step after a checkpoint: who resumes must have the same."""
    if checkpoint.is_dir():
        write_durably(checkpoint / NEXT_LOSS, sealed({"loss": loss}))


def next_loss(checkpoint: Path) -> float | None:
    """The loss of the step after it, where it is known. Raises CheckpointError for one that is damaged."""
    path = checkpoint / NEXT_LOSS
    try:
        return float(unsealed(path)["loss"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}") from None


def checkpoints_of(place: Path) -> Path:
    """The folder of checkpoints that `place` means: a run's, or itself. Raises ConfigError where there is none."""
    for folder in (place / "checkpoints", place):
        if all_of(folder):
            return folder
    raise ConfigError(
        f"{place} holds no checkpoint: give a run directory, or its folder of checkpoints{nearest_run(place)}"
    )


def nearest_run(place: Path) -> str:
    """The tail of an error message: which folder near `place`, that holds no checkpoint, is a run's; empty for none."""
    above = next((path for path in place.parents if path.is_dir()), Path())
    folders = [*above.glob("*/checkpoints"), *above.glob("*/*/checkpoints")]
    runs = [str(folder.parent) for folder in folders if all_of(folder)]
    return nearest(str(place), runs) if runs else ""
