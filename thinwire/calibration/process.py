"""The memory of a worker before it has a model, measured once by a worker that trains next to nothing."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from thinwire.data.cache import default_cache_dir

STATUS = Path("/proc/self/status")
# The module that measures, and the seconds after which it is given up.
MEASURES, MOST_S = "thinwire.launch.base", 300
# Set for the worker that measures, which must not wait for what it is to find.
MEASURING = "THINWIRE_MEASURES_PROCESS"
# After a failure, for so long no other process of a run need try.
TRY_AGAIN_S = 3600
# Of the file; what is measured differs by less than a unit.
FORMAT, UNIT_BYTES = 1, 1_000_000


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of a process.

    Attributes:
        data: what counts against a limit of data (RLIMIT_DATA): private memory, used or not.
        anonymous: what is in use of it.
        resident: that, and pages of files.
    """

    data: int
    anonymous: int
    resident: int

    @classmethod
    def now(cls) -> ProcessMemory:
        """Of this process. Raises OSError where the system does not say."""
        told = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        sizes = (1024 * int(told[name].split()[0]) for name in ("VmData", "RssAnon", "VmRSS"))
        return cls(*(-(-size // UNIT_BYTES) * UNIT_BYTES for size in sizes))


# More than was measured with torch 2.13 on Linux, for where nothing can be measured.
USUAL = ProcessMemory(480_000_000, 350_000_000, 400_000_000)


@cache
def process_memory() -> ProcessMemory:
    """What a worker of this machine takes with these versions. Measured the first time, in seconds, and then known.

    One process measures, and others that ask meanwhile wait for it. Where it can't be measured, the usual holds, and a
    start that is an hour later tries again: a tight limit of one shell is no property of the machine.
    """
    if MEASURING in os.environ:
        return USUAL
    identity = [FORMAT, *(version(name) for name in ("torch", "numpy", "numba")), sys.version, sys.prefix]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    path = default_cache_dir() / f"process-{key}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            measure_once(path)
        return ProcessMemory(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return USUAL


def measure_once(path: Path) -> None:
    """Let one process measure, unless that has failed lately. Raises OSError."""
    failed, folder = path.with_suffix(".failed"), os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists() or (failed.exists() and time.time() - failed.stat().st_mtime < TRY_AGAIN_S):
            return
        try:
            measure(path)
        except subprocess.SubprocessError:
            failed.touch()
    finally:
        os.close(folder)


def measure(path: Path) -> None:
    """Let a worker write what it takes. Raises OSError, or SubprocessError where it fails."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    command, quiet = [sys.executable, "-m", MEASURES, str(path)], subprocess.DEVNULL
    # As `thinwire train` sets it.
    env |= {MEASURING: "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(command, env=env, check=True, timeout=MOST_S, stdout=quiet, stderr=quiet)


def write(path: Path, found: ProcessMemory) -> None:
    """Write what was found; other processes see a whole file or none."""
    made = path.with_suffix(f".{os.getpid()}.tmp")
    made.write_text(json.dumps(asdict(found)))
    made.replace(path)
