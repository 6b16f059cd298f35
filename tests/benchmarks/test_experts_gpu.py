"""The half of the GPU's benchmark of experts and sequences that needs no GPU: it runs, and prints every row."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers import run_workers
from thinwire.errors import ConfigError


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location(
        "experts_gpu", Path(__file__).parents[2] / "benchmarks/experts_gpu.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["experts_gpu"] = module
    spec.loader.exec_module(module)
    return module


def small(rank: int, world_size: int) -> list[str]:
    flags = "--device cpu --tokens 32 --hidden 32 --inner 48 --longest 64 --rounds 1"
    return loaded().main(flags.split())


def test_every_row_is_there() -> None:
    for lines in run_workers(small, 2, local_size=2):
        starts = [line.split(",")[0] for line in lines]
        assert starts == ["product of experts"] * 2 + ["layer"] * len(loaded().CHUNKS) + ["attention"] * 4
        assert all(float(line.split(" ms")[0].split()[-1]) > 0 for line in lines)


def test_a_machine_without_gpus_is_told() -> None:
    benchmark = loaded()
    if benchmark.torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="has no GPU; nearest: --device cpu"):
        benchmark.main([])
