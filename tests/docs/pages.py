"""The documentation as data: its pages, fenced blocks, links and anchors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUN_MARK = "<!-- test: run -->"


@dataclass(frozen=True)
class Block:
    """A fenced block; `is_run`: the line above it is the mark that asks for it to be run."""

    page: Path
    line: int
    language: str
    text: str
    is_run: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def num_ranks(self) -> int:
        """Those of the last `torchrun --nproc-per-node N train.py` above it; 2 where there is none."""
        above = "\n".join(self.page.read_text().splitlines()[: self.line])
        return int((re.findall(r"--nproc-per-node (\d+) train\.py", above) or [2])[-1])

    def commands(self) -> list[list[str]]:
        """The words of every command of a shell block."""
        return [shlex.split(line, comments=True) for line in self.text.splitlines() if line.strip()]


def blocks(language: str) -> list[Block]:
    """Every fenced block of the language, on all pages."""
    return [block for page in PAGES for block in page_blocks(page) if block.language == language]


def page_blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    start, language = 0, ""
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if not start:
            start, language = number, line[3:].strip()
            continue
        above = lines[start - 2] if start > 1 else ""
        yield Block(page, start, language, "\n".join(lines[start : number - 1]), above == RUN_MARK)
        start = 0


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """Targets of the page's links that do not lead to another site."""
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The ids that headings of the page get."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def table_rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without the header; backquotes are taken off."""
    section = page.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in rows[2:]]
