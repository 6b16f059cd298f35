from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_gpu_benchmark_runs_whatever_it_finds(tmp_path: Path) -> None:
    result = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--quick", "--json", str(result)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(result.read_text())
    wrong = [row for row in rows["checks"] + rows["strategies"] + rows["sessions"] if not row["ok"]]
    assert not wrong
    assert len(rows["checks"]) == 18
    assert all(row["ratio"] for row in rows["timings"])
    assert [row["strategy"] for row in rows["strategies"]] == ["zero", "sdp4bit", "fsdp-bf16"]
    assert rows["sessions"][0]["found"].endswith("3 steps")
    assert ("no GPU found" in done.stdout) == (rows["readme"] == [])
