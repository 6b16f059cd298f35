"""The start-up table of all commands: what was asked for, what is in effect, why they differ."""

from __future__ import annotations

import sys
from collections.abc import Iterable

Row = tuple[str, str, str]
SENT = "sent per rank and step"


def sent_row(num_bytes: float, plain: float, bound: str = "") -> Row:
    """The row about the bytes that a rank sends in a step, beside those in fp32. bound: such as "at most "."""
    return SENT, f"{bound}{num_bytes / 1e6:.3f} MB", f"{plain / 1e6:.3f} MB in fp32"


def announce(rows: Iterable[Row]) -> None:
    """Print rows of (asked for, in effect, why they differ or how it was found) to stderr, one per line."""
    for asked, effect, reason in rows:
        print(f"thinwire: {asked}: {effect}" + (f" ({reason})" if reason else ""), file=sys.stderr)
