"""The start-up table of all commands: what was asked for, what is in effect, why they differ."""

from __future__ import annotations

import sys
from collections.abc import Iterable

Row = tuple[str, str, str]
SENT = "sent per rank and step"


def sent_row(num_bytes: float, plain: float, bound: str = "") -> Row:
    """The row about the bytes that a rank sends in a step, beside those in fp32. bound: such as "at most "."""
    return SENT, f"{bound}{sent_text(num_bytes)}", f"{sent_text(plain)} in fp32"


def sent_text(num_bytes: float) -> str:
    """Bytes in MB, or in a smaller unit where those would have no digits. Units are decimal."""
    for least, size, unit in ((1e4, 1e6, "MB"), (1e3, 1e3, "kB")):
        if num_bytes >= least:
            return f"{num_bytes / size:.3f} {unit}"
    return f"{num_bytes:.3g} B"


def announce(rows: Iterable[Row]) -> None:
    """Print rows of (asked for, in effect, why they differ or how it was found) to stderr, one per line."""
    for asked, effect, reason in rows:
        print(f"thinwire: {asked}: {effect}" + (f" ({reason})" if reason else ""), file=sys.stderr)
