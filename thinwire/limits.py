"""What this process holds of the memory that it may take; without torch, for the launcher."""

from __future__ import annotations

import resource
from pathlib import Path

STATM = Path("/proc/self/statm")


def data_bytes() -> int:
    """Bytes that count against this process's data limit, RLIMIT_DATA: private memory, used or not."""
    return int(STATM.read_text().split()[5]) * resource.getpagesize()


def limit_bytes() -> int | None:
    """The limit on this process's data (ulimit -d), in bytes; None: there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if limit == resource.RLIM_INFINITY else limit
