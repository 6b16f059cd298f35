"""Rewrite the results table of README.md from benchmarks/results/*.json, and that of losses in docs/methods/sdp4bit.md.

Each file holds what one benchmark printed: {"command": how to repeat it, "machine": where it ran, "readme": rows of
[what was compared, the ratio or figure measured]}. Files without "readme" are left out. loss.json holds
the lines of a table of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
LOSS_BEGIN, LOSS_END = "<!-- loss:begin -->", "<!-- loss:end -->"


def rows(results: Iterable[Path]) -> Iterator[tuple[str, str, str, str]]:
    """(what, measured, machine, command) of every result, in order of file names."""
    for path in sorted(results):
        result = json.loads(path.read_text())
        for what, measured in result.get("readme", []):
            yield what, measured, result["machine"], f"`{result['command']}`"


def table(cells: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = ["| what | measured | machine | command |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in cells]
    return "\n".join(lines)


def with_table(text: str, new_table: str, begin: str = BEGIN, end: str = END) -> str:
    """The text with what lies between the markers replaced; raises ValueError without both markers."""
    head, found, rest = text.partition(begin)
    _, also_found, tail = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"the page must hold the lines {begin} and {end}, in this order")
    return f"{head}{begin}\n{new_table}\n{end}{tail}"


def main() -> None:
    readme, page, results = ROOT / "README.md", ROOT / "docs/methods/sdp4bit.md", ROOT / "benchmarks/results"
    cells = list(rows(results.glob("*.json")))
    readme.write_text(with_table(readme.read_text(), table(cells)))
    print(f"README.md: {len(cells)} rows")
    if lines := json.loads((results / "loss.json").read_text()).get("table"):
        page.write_text(with_table(page.read_text(), "\n".join(lines), LOSS_BEGIN, LOSS_END))
        print(f"docs/methods/sdp4bit.md: {len(lines) - 2} rows of losses")


if __name__ == "__main__":
    main()
