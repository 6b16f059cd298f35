"""Checkpoints of the same world: complete or absent, whenever the machine dies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from thinwire.errors import ConfigError, ThinwireError

NUM_KEPT = 2
POINTER = "latest"


def latest(checkpoints: Path) -> Path | None:
    """The folder of the newest complete checkpoint."""
    pointer = checkpoints / POINTER
    if not pointer.is_file():
        return None
    name = pointer.read_text().strip()
    if not (name.startswith("step-") and name.removeprefix("step-").isdigit() and (checkpoints / name).is_dir()):
        there = ", ".join(sorted(path.name for path in checkpoints.glob("step-*"))) or "none"
        raise ConfigError(f"{pointer} is damaged: {name!r} is no checkpoint; write the name of one into it ({there})")
    return checkpoints / name


def step_of(checkpoint: Path | None) -> int:
    """The step after which the checkpoint was taken; 0 for none."""
    return int(checkpoint.name.removeprefix("step-")) if checkpoint else 0


def save(
    checkpoints: Path, step: int, rank: int, state: dict[str, Any], *, is_leader: bool, barrier: Callable[[], object]
) -> None:
    """Write this rank's part, wait for all ranks, then point to the new checkpoint and delete old ones.

    is_leader: the first rank of every machine, since machines may have disks of their own. Nothing is visible under
    its name before it is complete.
    """
    folder = checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"rank{rank}.pt", rank, lambda path: torch.save(state, path))
    barrier()
    if is_leader:
        _write(checkpoints / POINTER, rank, lambda path: path.write_text(folder.name))
        for old in sorted(checkpoints.glob("step-*"))[:-NUM_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    # Nobody starts a step in which it would wait for another's disk.
    barrier()


def load(checkpoint: Path, rank: int) -> dict[str, Any]:
    """This rank's part; raises ThinwireError for a file that is missing or damaged."""
    path = checkpoint / f"rank{rank}.pt"
    try:
        return torch.load(path, weights_only=True)
    except OSError as error:
        raise ThinwireError(f"checkpoint {path} can't be read: {error.strerror}") from error
    except (RuntimeError, ValueError, UnpicklingError) as error:
        raise ThinwireError(f"checkpoint {path} is damaged; delete it, or copy it again") from error


def _write(path: Path, rank: int, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.rank{rank}.tmp")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
