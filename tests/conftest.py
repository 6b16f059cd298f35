"""For all tests: their environment, and the order of the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes import thinwire, and without bytecode on disk each would compile it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Those that take longest, the longest first: one that began last would have the machine to itself.
LONGEST = (
    "compare/test_race.py", "training/test_runs.py", "methods/test_suite.py", "training/test_recovery.py",
    "golden/test_golden.py", "islands/test_membership.py", "docs/test_docs.py", "methods/test_reductions.py",
    "hosts/test_zeropp.py", "checkpoint/test_layouts.py", "hosts/test_layouts.py", "hosts/test_fsdp_meshes.py",
    "codecs/test_compiled.py", "training/test_mesh.py", "lab/test_command.py", "training/test_stages.py",
    "hosts/pipeline/test_stage.py", "hosts/pipeline/test_tensor.py", "hosts/sequence/test_parallel.py",
    "hosts/experts/test_parallel.py", "islands/test_gossip.py", "benchmarks/test_gpu.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
