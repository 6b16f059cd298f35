"""The files of a checkpoint by name, and how one is written; who lists checkpoints waits for no torch."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.errors import ThinwireError

STATE_FILE = "state.json"
# As torch.distributed.checkpoint names the first file of the first rank.
DATA_FILE = "__0_0.distcp"
# The index of torch.distributed.checkpoint.
METADATA = ".metadata"


class CheckpointError(ThinwireError, RuntimeError):
    """A checkpoint is damaged or lacks something asked of it. The message names the file or the tensor."""


def part_of(folder: Path, rank: int) -> Path:
    """Folder of the part that one rank wrote."""
    return folder / f"rank{rank}"


def rank_of(part: Path) -> int:
    """Rank that wrote a part."""
    return int(part.name.removeprefix("rank"))


def parts_of(folder: Path) -> list[Path]:
    """Folders of the parts in a checkpoint, by rank."""
    return sorted((path.parent for path in folder.glob(f"rank*/{STATE_FILE}")), key=rank_of)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, then rename it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
