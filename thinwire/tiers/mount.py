"""Finds out which file system a folder lies on, and whether that is a disk or memory."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.errors import ConfigError, unusable_folder

# They accept O_DIRECT and keep all files in memory.
MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
MOUNTS = Path("/proc/self/mountinfo")


def mount_type(folder: Path) -> str:
    """The type of the file system of a folder that need not exist yet, such as ext4.

    Empty on systems other than Linux.
    """
    if not MOUNTS.exists():
        return ""
    place, best, found = folder.absolute().resolve(), -1, ""
    for line in MOUNTS.read_text().splitlines():
        left, _, right = line.partition(" - ")
        # A space in a path is written as \040.
        point = Path(left.split(" ")[4].encode().decode("unicode_escape"))
        # Of several mounts on one point the last one is seen.
        if place.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), right.split(" ")[0]
    return found


def check_folder(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError for a folder that is not writable, lies in memory, or is on a disk without `num_bytes` free."""
    if why := unusable_folder(folder):
        raise ConfigError(f"store {folder}: {why}")
    if not hasattr(os, "O_DIRECT"):
        raise ConfigError(f"store {folder}: this system has no O_DIRECT; nearest: train on Linux, or without a store")
    if (kind := mount_type(folder)) in MEMORY_TYPES:
        here = Path.cwd()
        near = f"; nearest: {here}" if mount_type(here) not in MEMORY_TYPES else ""
        raise ConfigError(f"store {folder}: lies on {kind}, which is memory and not a disk{near}")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    state = os.statvfs(existing)
    free = state.f_bavail * state.f_frsize
    if free < num_bytes:
        raise ConfigError(
            f"store {folder}: needs {num_bytes / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free; nearest: a "
            "folder on another disk, or more ranks, which share what is stored"
        )
