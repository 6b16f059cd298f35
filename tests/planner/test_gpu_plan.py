"""A plan for machines whose ranks have a GPU each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.machines import FAST, machine
from thinwire.compare.tune import run_tune
from thinwire.compare.verify import run_plan
from thinwire.cost import Cores
from thinwire.errors import ConfigError
from thinwire.planner import selection as module
from thinwire.planner.plan import plan
from thinwire.report.page import plan_table
from thinwire.report.run import RunFiles

GPU = "NVIDIA H100"


def test_a_plan_for_gpus_counts_no_cores_and_the_memory_of_their_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NUM_SIMULATED", 2)
    # Eight threads of each rank on two cores: computing there would take 16 times as long.
    made = replace(machine(FAST), cores=Cores((0,) * 4, (2.0,), 0.5), threads=8)
    gpus = replace(made, device=GPU, memory_bytes=8e10)
    found = plan("tiny", gpus, tokens_per_step=1024, seq_len=64, micro_batch=4, strategies=("zero",), stages=1)
    grid = found.pricing.placed((0, 1, 2, 3))
    assert grid.busy == 1.0
    assert replace(found.pricing, machine=made).placed((0, 1, 2, 3)).busy > 16
    told = json.loads(found.to_json())["predicted"]
    assert told["peak_allocated_bytes"] == found.best.memory_bytes and "peak_rss_bytes" not in told
    # It stands beside the peak of the tensors, not beside that of the process.
    step = {"step": 1, "step_s": 1.0, "peak_allocated_bytes": 2 * told["peak_allocated_bytes"]}
    run = RunFiles(tmp_path, [step], {"peak_rss_bytes": 9e9}, "", plan={"predicted": told})
    assert "100 %" in plan_table(run) and "peak_rss_bytes" not in plan_table(run)


@pytest.mark.parametrize("command", [run_plan, run_tune])
def test_ways_for_gpus_are_not_raced_on_the_cpu(command: object, tmp_path: Path) -> None:
    file, out = tmp_path / "machine.json", tmp_path / "plan.toml"
    file.write_text(replace(machine(FAST), device=GPU).to_json())
    flags = ["--machine", str(file), "--out", str(out), "--model", "tiny", "--tokens-per-step", "4096"]
    said = f"measured on {GPU}, and ranks of the lab train on the CPU, .* thinwire plan --machine .* without"
    with pytest.raises(ConfigError, match=said):
        command([*flags, "--verify", "2"])  # type: ignore[operator]
    assert not out.exists()
