"""What the benchmark of plans says of cells that are known, and that it measures none of them twice."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

# It takes the marks of pages from a neighbour.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
SPEC = importlib.util.spec_from_file_location("planner", Path(__file__).parents[2] / "benchmarks/planner.py")
assert SPEC is not None and SPEC.loader is not None
planner: Any = importlib.util.module_from_spec(SPEC)
sys.modules["planner"] = planner
SPEC.loader.exec_module(planner)


def cell(network: str, strategy: str, predicted_s: float, took_s: float, compute: tuple[float, float]) -> Any:
    """A cell whose memory is 10% off on the slow network with zero; the rest of a step is waiting."""
    parts = {"compute_s": compute, "exposed_comm_s": (predicted_s - compute[0], took_s - compute[1])}
    is_off = (network, strategy) == ("slow", "zero")
    return planner.Cell(network, strategy, predicted_s, took_s, 1.1e9 if is_off else 1e9, 1e9, parts, 0.5)


CELLS = [
    cell("slow", "zero", 2.2, 2.0, (1.0, 1.0)), cell("slow", "sdp4bit", 1.0, 1.25, (0.8, 1.0)),
    cell("fast", "zero", 1.0, 1.1, (0.9, 1.0)), cell("fast", "sdp4bit", 1.1, 1.0, (1.1, 1.0)),
]  # fmt: skip


def test_errors_and_regrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.regret(CELLS[:2]) == 1.0 and planner.regret(CELLS[2:]) == pytest.approx(1.1)
    planner.told(CELLS)
    printed = capsys.readouterr().out
    assert (
        "4 cells: |error| of the step median 10.0%, worst 20.0%" in printed
        and "memory: |error| median 0.0%, worst 10.0%" in printed
    )
    assert "compute_s is missed by 9.5% in the median, at worst by 16.0%" in printed
    lines = {line[:25].strip(): line[25:].removeprefix(" at least").split() for line in printed.splitlines()}
    assert lines["thinwire plan"] == ["0", "1.050", "1.100"] and lines["always zero"] == ["0", "1.350", "1.600"]
    assert lines["run all of them"] == ["2", "1.000", "1.000"] and "before a cell: median 0.5" in printed
    assert lines["torchtitan, its default"] == lines["always zero"]
    # Its candidates were not all measured.
    assert "DeepSpeed, autotuning" in lines and lines["DeepSpeed, autotuning"] == ["3", "1.350", "1.600"]
    assert "DeepSpeed, autotuning     at least 3" in printed and "calibrating" not in printed
    timed = [replace(each, calibrated_s=seconds) for each, seconds in zip(CELLS, (40.0, 0.0, 50.0, 0.0), strict=True)]
    assert "calibrating a network took 45 s in the median, at most 50 s" in list(planner.summary(timed))
    ElementTree.fromstring(planner.picture(CELLS))


def test_cells_that_are_known_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, rows, plot, page = (tmp_path / name for name in ("cells.jsonl", "rows.json", "cells.svg", "page.md"))
    network = str(planner.LabSpec(nodes=4, rate="50mbit"))
    file.write_text(json.dumps(asdict(cell(network, "zero", 1.0, 1.1, (0.5, 0.5)))) + "\n")
    page.write_text(f"before\n{planner.BEGIN}\n{planner.END}\n")
    places = {"RESULTS": file, "README_ROWS": rows, "PICTURE": plot, "PAGE": page, "ROOT": tmp_path}
    for name, value in places.items():
        monkeypatch.setattr(planner, name, value)
    asked: list[list[str]] = []

    def cells(spec: object, strategies: list[str], *rest: object) -> list[Any]:
        asked.append(strategies)
        return [cell(str(spec), name, 1.0, 1.0, (0.5, 0.5)) for name in strategies]

    monkeypatch.setattr(planner, "cells", cells)
    words = ["planner", "--rates", "50mbit", "--strategies", "zero", "ddp", "--out", str(file)]
    monkeypatch.setattr("sys.argv", [*words, "--most", "2"])
    planner.main()
    assert asked == [["ddp"], ["zero"]] and len(planner.read(file)) == 3
    monkeypatch.setattr("sys.argv", words)
    planner.main()
    assert asked[2:] == [["ddp"]] and len(planner.read(file)) == 4 and "xmlns" in plot.read_text()
    assert "4 cells" in rows.read_text()
    assert (
        page.read_text().count("| rate=50mbit") == 4 and "| `thinwire plan` | 0 | 1.050 | 1.100 |" in page.read_text()
    )


def test_the_lab_has_all_that_a_network_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(planner.subprocess, "run", lambda words, **_: asked.append(words))
    spec = planner.LabSpec(nodes=4, rate="100mbit", slow={3: "25mbit"}, link={(0, 1): "20mbit"})
    planner.in_lab(spec, ["calibrate"])
    words = asked[0][asked[0].index("lab") + 1 : asked[0].index("--")]
    assert words == ["--nodes", "4", "--rate", "100mbit", "--slow", "3=25mbit", "--link", "0-1=20mbit"]
