"""The half of the GPU's microbenchmarks that needs no GPU: kernels as text, and figures from launches."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.calibration.published import TABLES

SPEC = importlib.util.spec_from_file_location("gpu_micro", Path(__file__).parents[2] / "benchmarks/gpu_micro.py")
assert SPEC is not None and SPEC.loader is not None
micro: Any = importlib.util.module_from_spec(SPEC)
sys.modules["gpu_micro"] = micro
SPEC.loader.exec_module(micro)


def test_every_kernel_has_a_name_of_its_own_and_balanced_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = micro.kernels()
    assert len({each.name for each in found}) == len(found)
    for each in found:
        assert each.code.count("{") == each.code.count("}") and "run(const u64* given" in each.code
        assert micro.fits(each, "sm_90a") and micro.fits(each, "sm_80") == (each.arch == "sm_80")
        # Ada has products of fp8, and nothing else of what Ampere lacks.
        assert micro.fits(each, "sm_89") == (micro.fits(each, "sm_80") or each.name.startswith("mma fp8"))
    assert micro.main(["--list", "--only", "wgmma"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == (1 + 2 * 2) * len(micro.WIDTHS) + 4
    # Every name that stands for another in the published tables is one of them.
    names = {name for table in TABLES.values() for name in table}
    assert {each.published for each in found if each.published} <= names


def test_a_figure_stands_beside_what_is_published_for_other_devices() -> None:
    chase, ring = (next(each for each in micro.kernels() if name in each.name) for name in ("l2 latency", "ring of 2"))
    figure = micro.figure(chase, [3e5, 2.6e5 * 1.024, 2e5], [1.0], 1, "this one")
    assert figure.value == pytest.approx(260.0) and figure.unit == "cycles" and figure.device == "this one"
    assert figure.published == {"H800 PCIe": 263.0, "A100 PCIe": 261.5, "RTX 4090": 273.0}
    figure = micro.figure(ring, [1.0], [2e-3, 1e-3, 3e-3], 100, "this one")
    assert figure.value == pytest.approx(100 * micro.RING_BYTES * micro.RATE_STEPS / 2e-3)
    assert figure.published == {"H800 PCIe": pytest.approx(3.27e12)}
    beside = {
        each.name: micro.figure(each, [1.0], [1.0], 1, "this one").published
        for each in micro.kernels() if "zeros" in each.name or "latency" in each.name
    }  # fmt: skip
    assert beside["mma fp16 zeros"]["A100 PCIe"] == pytest.approx(310.6e12) and not beside["mma fp8 zeros"]
    assert beside["wgmma fp8 n256 SS zeros"] == {"H800 PCIe": pytest.approx(1448.4e12)}
    assert beside["wgmma fp16 n256 RS zeros"] and not beside["wgmma fp16 n128 SS zeros"]


def test_eight_bits_pay_from_the_first_size_after_the_last_at_which_they_are_slower() -> None:
    assert micro.crossover({512: 1.1, 1024: 0.8, 2048: 1.2, 4096: 1.3}) == 2048
    assert micro.crossover({512: 1.1, 1024: 1.2}) == 512 and micro.crossover({512: 1.1, 1024: 0.9}) is None


class LaunchConfig:
    """As cuda.core 1.x has it: only Hopper takes clusters, which the grid then counts."""

    has_clusters = True

    def __init__(
        self, grid: int, block: int, shmem_size: int, cluster: int | None = None, is_cooperative: bool = False
    ) -> None:
        if cluster is not None and not self.has_clusters:
            raise RuntimeError("thread block clusters are not supported below compute capability 9.0")
        self.blocks = grid * (cluster or 1)


@pytest.mark.parametrize("has_clusters", [True, False], ids=["hopper", "ampere"])
def test_kernels_are_launched_as_cuda_core_takes_them(has_clusters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[LaunchConfig] = []

    def record(*, options: dict[str, bool]) -> float:
        # Renamed in 1.0; milliseconds from event to event.
        assert options == {"timing_enabled": True}
        return 2.0 * len(launched)

    def launch(stream: object, config: LaunchConfig, kernel: object, *args: int) -> None:
        launched.append(config)

    stream = SimpleNamespace(record=record, sync=lambda: None)
    device = SimpleNamespace(set_current=lambda: None, create_stream=lambda: stream)
    core: Any = ModuleType("cuda.core")
    core.Device, core.LaunchConfig, core.launch = (lambda number: device), LaunchConfig, launch
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(LaunchConfig, "has_clusters", has_clusters)
    for name, answer in {"current_device": 0, "synchronize": None, "get_device_name": "A GPU"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    compiled, arch = SimpleNamespace(get_kernel=lambda name: name), "sm_90a" if has_clusters else "sm_80"
    names = ("l1 latency cycles", "mma fp16 random", "dsm ring of 4", "dsm histogram of 1, 128 threads", "dsm latency")
    for kernel in micro.kernels():
        if not kernel.name.startswith(names) or not micro.fits(kernel, arch):
            continue
        launched.clear()
        # A latency is that of one cluster.
        blocks = 16 if kernel.amount else kernel.cluster
        found = micro.measured(kernel, compiled, blocks, "cpu")
        # What a figure counts is what ran.
        assert {config.blocks for config in launched} == {blocks}, kernel.name
        assert len(launched) == micro.REPEATS + 2
        if kernel.amount:
            assert found.value == pytest.approx(blocks * kernel.amount * kernel.steps / 2e-3)
