"""What a worker takes before it has a model: measured once, by a worker."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from thinwire.calibration import process
from thinwire.calibration.process import USUAL, ProcessMemory, process_memory


def test_a_worker_measures_itself_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "default_cache_dir", lambda: tmp_path / "cache")
    # The shell's number of threads is none of the worker's.
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = process_memory.__wrapped__()
    (path,) = (tmp_path / "cache").iterdir()
    assert found == ProcessMemory(**json.loads(path.read_text())) != USUAL
    # What it reserves is more than what it touches, and pages of libraries come on top.
    assert 10**8 < found.anonymous < found.data < USUAL.data and found.anonymous < found.resident < 10**9
    monkeypatch.setattr(process, "measure", lambda path: pytest.fail("it is known"))
    assert process_memory.__wrapped__() == found


def test_where_nothing_can_be_measured_the_usual_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "default_cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(process, "MEASURES", "thinwire.no_such_module")
    with pytest.raises(subprocess.CalledProcessError):
        process.measure(tmp_path / "file")
    assert process_memory.__wrapped__() == USUAL
    asked: list[Path] = []
    monkeypatch.setattr(process, "measure", asked.append)
    assert process_memory.__wrapped__() == USUAL and not asked
    # A later start tries again.
    (failed,) = (tmp_path / "cache").iterdir()
    os.utime(failed, (0, 0))
    assert process_memory.__wrapped__() == USUAL and len(asked) == 1


def test_processes_that_ask_together_measure_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds the folder held, waits, and then finds what the first has measured."""
    monkeypatch.setattr(process, "default_cache_dir", lambda: tmp_path)
    found, asked = ProcessMemory(3, 1, 2), list[Path]()
    arrived, flock = threading.Semaphore(0), process.fcntl.flock

    def measured(path: Path) -> None:
        # The other one has come, and waits.
        assert arrived.acquire(timeout=60) and arrived.acquire(timeout=60)
        asked.append(path)
        process.write(path, found)

    def held(folder: int, how: int) -> None:
        arrived.release()
        flock(folder, how)

    def ask(_: int) -> ProcessMemory:
        return process_memory.__wrapped__()

    monkeypatch.setattr(process, "measure", measured)
    monkeypatch.setattr(process.fcntl, "flock", held)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(ask, range(2))] == [found, found]
    assert len(asked) == 1
