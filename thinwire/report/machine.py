"""The machine on which figures were measured, and the memory that a process has used."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.metadata import version
from pathlib import Path

from thinwire import __version__


def machine() -> dict[str, str | int]:
    """Host, processor, number of usable cores, and system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    processor = model or platform.processor() or platform.machine()
    return {"host": platform.node(), "processor": processor, "cores": num_cores(), "system": platform.platform()}


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_rss_bytes() -> int:
    """The peak memory of this process (VmHWM); on systems other than Linux, by getrusage."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Versions of the packages that affect the figures."""
    return {
        "thinwire": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "numba": version("numba"),
    }
