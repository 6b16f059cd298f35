"""The start-up table of all commands: asked for, in effect, why they differ."""

from __future__ import annotations

import sys
from collections.abc import Iterable

Row = tuple[str, str, str]


def announce(rows: Iterable[Row]) -> None:
    """Print rows of (asked for, in effect, why they differ or how it was found) to stderr, one per line."""
    for asked, effect, reason in rows:
        print(f"thinwire: {asked}: {effect}" + (f" ({reason})" if reason else ""), file=sys.stderr)
