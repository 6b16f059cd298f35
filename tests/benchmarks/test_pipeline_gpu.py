"""The half of the benchmark of compiled pipelines that needs no GPU: it runs, and gradients are those of torch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers import run_workers

FOLDER = Path(__file__).parents[2] / "benchmarks"


def loaded() -> Any:
    # It takes its clock from a neighbour.
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("pipeline_gpu", FOLDER / "pipeline_gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pipeline_gpu"] = module
    spec.loader.exec_module(module)
    return module


def small(rank: int, world_size: int) -> list[str]:
    # This backend needs no C++ compiler, and compiles at once.
    flags = "--device cpu --backend aot_eager --layers 1 --hidden 16 --heads 2 --tokens 4 --micro-batches 4 --repeats 1"
    return loaded().main(flags.split())


def test_layers_run_compiled_and_as_they_are() -> None:
    for lines in run_workers(small, 2):
        assert [line.split(":")[0] for line in lines] == ["as they are", "compiled", "compiled layers"]
        assert all(float(line.rsplit(" ", 1)[1]) < 1e-6 for line in lines[:2])


def test_a_machine_without_gpus_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = loaded()
    if benchmark.torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit) as ended:
        benchmark.main([])
    assert ended.value.code == 2 and "has no GPU; nearest: --device cpu" in capsys.readouterr().err
