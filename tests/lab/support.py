"""What the lab's tests share: whether a lab can be made here, and processes found by a mark in their command line."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers import HANG_S
from thinwire.lab import why_unavailable

REASON = why_unavailable()
needs_network = pytest.mark.skipif(REASON is not None, reason=f"no emulated network here: {REASON}")


def processes_with(mark: str) -> list[int]:
    """PIDs whose command line holds `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return when the condition holds; fails after HANG_S."""
    due = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < due, f"still waiting for {what}"
        time.sleep(0.02)
