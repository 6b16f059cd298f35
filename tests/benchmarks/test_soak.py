"""The soak, for seconds instead of half an hour."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

# What it repeats, tests/islands and tests/training/test_membership.py show once.
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


def test_three_islands_survive_a_fault_every_few_seconds(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "benchmarks/soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None and spec.loader is not None
    soak = sys.modules["soak"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    found = soak.main(
        ["--no-lab", "--workers", "3", "--minutes", "0.3", "--every", "5", "8", "--calm", "12", "--messages", "2",
         "--timeout", "8", "--run-dir", str(tmp_path / "run"), "--seed", "1"]
    )  # fmt: skip
    assert found.survived, (tmp_path / "soak.log").read_text()[-3000:]
    assert found.faults["kill"] + found.faults["freeze"] >= 2 and found.changes >= 1
