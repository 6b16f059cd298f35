"""Steps that a durable run has kept on this machine's disks: which they are, and how their space is freed."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from thinwire.checkpoint import CheckpointError
from thinwire.checkpoint.folder import Manifest
from thinwire.errors import ConfigError
from thinwire.hosts.offload.journal import TURNS, locked
from thinwire.report.units import bytes_text
from thinwire.run.run_dir import RunDir


def kept_folders(run_dir: RunDir) -> list[Path]:
    """The folders of ranks in which this run has kept steps."""
    return [folder for store in run_dir.durable_stores() for folder in sorted(store.glob("rank*"))]


def steps_in(folder: Path) -> set[int]:
    """The steps that a rank's folder holds."""
    found = set()
    for turn in TURNS:
        with suppress(CheckpointError):
            found.add(Manifest.read(folder / turn).step)
    return found


def last_kept(run_dir: RunDir) -> int:
    """The last step that all ranks' folders on this machine hold; 0: none."""
    folders = kept_folders(run_dir)
    return max(set.intersection(*map(steps_in, folders)), default=0) if folders else 0


def free_kept(run_dir: RunDir, step: int) -> list[str]:
    """Delete what the run has kept up to a step, and no longer needs. Return lines on what was done.

    What another process uses, and later steps, stay.
    """
    lines, num_bytes, freed = list[str](), 0, list[Path]()
    for folder in kept_folders(run_dir):
        if (kept := max(steps_in(folder), default=0)) > step:
            lines.append(f"{folder} keeps step {kept}, which is later than step {step}: delete it if you don't need it")
            continue
        # In use, or gone meanwhile.
        with suppress(ConfigError, FileNotFoundError), locked(folder):
            num_bytes += sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder, ignore_errors=True)
            freed.append(folder)
    for store in {folder.parent for folder in freed}:
        with suppress(OSError):
            store.rmdir()
    if freed:
        lines.append(f"freed {bytes_text(num_bytes)}: older steps of this durable run, in {', '.join(map(str, freed))}")
    return lines
