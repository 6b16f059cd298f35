"""The table that everything prints at its start: asked for, in effect, why they differ."""

from __future__ import annotations

import sys
from collections.abc import Iterable

Row = tuple[str, str, str]


def announce(rows: Iterable[Row]) -> None:
    """Print the rows of (asked for, in effect, why they differ or how it was found), one a line, to stderr."""
    for asked, effect, reason in rows:
        print(f"thinwire: {asked}: {effect}" + (f" ({reason})" if reason else ""), file=sys.stderr)
