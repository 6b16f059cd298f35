"""The half of the GPU's memory benchmark that needs no GPU: every part runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

SPEC = importlib.util.spec_from_file_location("gpu_memory", Path(__file__).parents[2] / "benchmarks/gpu_memory.py")
assert SPEC is not None and SPEC.loader is not None
memory: Any = importlib.util.module_from_spec(SPEC)
sys.modules["gpu_memory"] = memory
SPEC.loader.exec_module(memory)


def test_the_cpu_half_runs(tmp_path: Path) -> None:
    assert memory.main(["--quick", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert {each["part"] for each in found} == set(memory.PARTS)
    assert all(each["value"] > 0 for each in found)
