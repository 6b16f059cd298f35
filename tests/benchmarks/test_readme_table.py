from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def readme_table() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks/readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_come_from_the_results(readme_table: ModuleType, tmp_path: Path) -> None:
    shown = {"command": "python b.py", "machine": "2 cores", "readme": [["a | b", "7.7 times"]], "more": 1}
    (tmp_path / "b.json").write_text(json.dumps(shown))
    (tmp_path / "a.json").write_text(json.dumps({"kernels": {}}))
    cells = list(readme_table.rows(tmp_path.glob("*.json")))
    assert cells == [("a | b", "7.7 times", "2 cores", "`python b.py`")]
    assert readme_table.table(cells).splitlines()[-1] == r"| a \| b | 7.7 times | 2 cores | `python b.py` |"


def test_only_what_lies_between_the_markers_changes(readme_table: ModuleType) -> None:
    readme = f"head\n{readme_table.BEGIN}\nold\n{readme_table.END}\ntail\n"
    once = readme_table.with_table(readme, "new")
    assert once == f"head\n{readme_table.BEGIN}\nnew\n{readme_table.END}\ntail\n"
    assert readme_table.with_table(once, "new") == once


def test_missing_markers_are_refused(readme_table: ModuleType) -> None:
    with pytest.raises(ValueError, match="must hold the lines"):
        readme_table.with_table(f"{readme_table.END} {readme_table.BEGIN}", "new")
