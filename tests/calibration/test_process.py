"""What a worker takes before it has a model: measured once, by a worker."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from thinwire.calibration import process
from thinwire.calibration.process import USUAL, ProcessMemory, process_memory


def test_a_worker_measures_itself_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "default_cache_dir", lambda: tmp_path / "cache")
    found = process_memory.__wrapped__()
    (path,) = (tmp_path / "cache").iterdir()
    assert found == ProcessMemory(**json.loads(path.read_text())) != USUAL
    # What it reserves is more than what it touches, and pages of libraries come on top.
    assert 10**8 < found.anonymous < found.data < 10**9 and found.anonymous < found.resident < 10**9
    monkeypatch.setattr(process, "measure", lambda path: pytest.fail("it is known"))
    assert process_memory.__wrapped__() == found


def test_where_nothing_can_be_measured_the_usual_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "default_cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(process, "MEASURES", "thinwire.no_such_module")
    with pytest.raises(subprocess.CalledProcessError):
        process.measure(tmp_path / "file")
    assert process_memory.__wrapped__() == USUAL
    monkeypatch.setattr(process, "measure", lambda path: pytest.fail("it is known that it fails"))
    assert process_memory.__wrapped__() == USUAL
