"""Finds out which file system a folder lies on, and whether that is a disk or memory."""

from __future__ import annotations

import os
import re
import tempfile
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
    for line in MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        point = Path(unescaped(left.split(" ")[4]))
        # Of several mounts on one point the last one is seen.
        if place.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), right.split(" ")[0]
    return found


def unescaped(path: str) -> str:
    """A path of the kernel's list of mounts, in which a space is written as \\040; other letters are as they are."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def disk_folder() -> Path:
    """A folder on a disk for the files of this user's processes, that need not exist yet. Raises ConfigError."""
    for parent in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):
        if mount_type(parent) not in MEMORY_TYPES and not unusable_folder(parent):
            return parent / f"thinwire-{os.getuid()}"
    raise ConfigError("residency: no store is stated, and temporary files lie in memory: name a folder on a disk")


def near_disk() -> str:
    """Tail of an error message about a folder that can't be used: one on a disk that can."""
    try:
        return f"; nearest: {disk_folder()}"
    except ConfigError:
        return "; name a folder on a disk"


def check_folder(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError for a folder that is not writable, lies in memory, or is on a disk without `num_bytes` free."""
    if why := unusable_folder(folder):
        raise ConfigError(f"store {folder}: {why}{near_disk()}")
    if not hasattr(os, "O_DIRECT"):
        raise ConfigError(f"store {folder}: this system has no O_DIRECT; nearest: train on Linux, or without a store")
    if (kind := mount_type(folder)) in MEMORY_TYPES:
        raise ConfigError(f"store {folder}: lies on {kind}, which is memory and not a disk{near_disk()}")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    state = os.statvfs(existing)
    free = state.f_bavail * state.f_frsize
    if free < num_bytes:
        raise ConfigError(
            f"store {folder}: needs {size_text(num_bytes)} and the disk has {size_text(free)} free; nearest: a folder "
            "on another disk, or more ranks, which share what is stored"
        )


def size_text(num_bytes: float) -> str:
    """Bytes in GB, or in MB where they are less than one."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"
