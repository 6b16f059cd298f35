"""Reads sizes and disk rates from text."""

from __future__ import annotations

import re

from thinwire.errors import ConfigError

# The variable by which an emulated network tells its ranks the rate of their disks.
LENT_RATE = "THINWIRE_DISK_RATE"
UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
}  # fmt: skip


def read_bytes(text: str, what: str = "memory", behind: str = "") -> int:
    """Bytes of a text such as `2gb` or `512mib`. Raises ConfigError that names a valid spelling.

    behind: what followed the text.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in UNITS:
        hint = f"{found[1]}gb" if found and float(found[1]) else "2gb"
        raise ConfigError(
            f"{what} {text + behind!r}: is not a number and a unit of {', '.join(UNITS)}; did you mean "
            f"{hint + behind!r}?"
        )
    return int(float(found[1]) * UNITS[found[2].lower()])


def read_byte_rate(text: str) -> float:
    """Bytes per second of a text such as `500MB/s`. Raises ConfigError that names a valid spelling."""
    if not text.endswith("/s"):
        raise ConfigError(f"disk rate {text!r}: is not a size a second; did you mean '500MB/s'?")
    rate = read_bytes(text.removesuffix("/s"), "disk rate", "/s")
    if not rate:
        raise ConfigError(f"disk rate {text!r}: must be above 0; nearest: '1mb/s'")
    return float(rate)
