"""The half of the GPU's memory benchmark that needs no GPU: every part runs, and the order of reads is what it says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("width", [32, 50, 250, 5])
def test_a_shifted_row_is_read_once_and_in_fewer_lines(width: int) -> None:
    """Behind the first element of a whole line; a row that begins with a line is read in order."""
    for number in range(64):
        address = number * width * 4
        order = memory.shifted(width, 4, address)
        assert sorted(order.tolist()) == list(range(width))
        if width > 32:
            assert (address + 4 * int(order[0])) % memory.LINE_BYTES == 0
        assert memory.lines(order, 4, address) <= memory.lines(torch.arange(width), 4, address) + 1
    if width == 250:
        addresses = range(0, 64 * 1000, 1000)
        plain = sum(memory.lines(torch.arange(250), 4, at) for at in addresses)
        assert sum(memory.lines(memory.shifted(250, 4, at), 4, at) for at in addresses) < 0.7 * plain
