"""Pages in docs/methods join the site's navigation, and their strategies the front page's table, by being there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HEADING = "## Which strategy"
FRONT_PAGE = "index.md"


def on_config(config: Any) -> Any:
    """Add to the navigation's methods each page that is not listed."""
    (methods,) = [section["Methods"] for section in config["nav"] if "Methods" in section]
    listed = {path for entry in methods for path in entry.values()}
    folder = Path(config["docs_dir"])
    found = (path.relative_to(folder).as_posix() for path in sorted((folder / "methods").glob("*.md")))
    methods += [path for path in found if path not in listed]
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Add to the front page's table of strategies the rows of the methods' own pages."""
    if page.file.src_uri != FRONT_PAGE:
        return markdown
    pages = sorted((Path(config["docs_dir"]) / "methods").glob("*.md"))
    rows = [row for path in pages for row in strategy_rows(path.read_text())]
    before, heading, table = markdown.partition(HEADING)
    return before + heading + "\n".join([table.rstrip(), *rows]) + "\n" if rows else markdown


def strategy_rows(text: str) -> list[str]:
    """The rows of a page's table of strategies, without its header."""
    section = text.partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]
