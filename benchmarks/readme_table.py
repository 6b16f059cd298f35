"""Rewrite the results table of README.md from benchmarks/results/*.json.

Each file holds what one benchmark printed: {"command": how to repeat it, "machine": where it ran, "readme": rows of
[what was compared, the ratio or figure measured]}. Files without "readme" are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


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


def with_table(readme: str, new_table: str) -> str:
    """The text with what lies between the markers replaced; raises ValueError without both markers."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md must hold the lines {BEGIN} and {END}, in this order")
    return f"{head}{BEGIN}\n{new_table}\n{END}{tail}"


def main() -> None:
    readme = ROOT / "README.md"
    cells = list(rows((ROOT / "benchmarks/results").glob("*.json")))
    readme.write_text(with_table(readme.read_text(), table(cells)))
    print(f"README.md: {len(cells)} rows")


if __name__ == "__main__":
    main()
