"""Quantities for readers: three digits and a unit. Units are decimal: 1 MB is 10^6 bytes."""

from __future__ import annotations

import math

MISSING = "?"


def short(value: float) -> str:
    """A number with about three digits, and k, M, G or T if it is large."""
    if not math.isfinite(value):
        return MISSING if math.isnan(value) else "∞"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            divisor = 1e3 if letter == "k" else size
            return f"{_digits(value / divisor)}{letter}"
    return _digits(value)


def bytes_text(num_bytes: float) -> str:
    """Bytes with a decimal unit."""
    if not math.isfinite(num_bytes):
        return MISSING
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= size:
            return f"{_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def enough_text(num_bytes: float) -> str:
    """Bytes rounded up to whole megabytes, so that as much as is said suffices."""
    return f"{math.ceil(num_bytes / 1e6)} MB"


def seconds_text(seconds: float) -> str:
    """A duration: milliseconds below a second, minutes above a hundred seconds."""
    if not math.isfinite(seconds):
        return MISSING
    if abs(seconds) < 1:
        return f"{_digits(seconds * 1e3)} ms"
    if seconds < 100:
        return f"{_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def sum_text(seconds: float, first: float) -> str:
    """A duration as the sum of `first` and the rest, rounded so that the figures add up."""
    if not math.isfinite(first) or not 0 < seconds < 100:
        return f"{seconds_text(seconds)} = {seconds_text(first)} + {seconds_text(seconds - first)}"
    scale, unit = (1e3, "ms") if seconds < 1 else (1.0, "s")
    places = _places(scale * seconds)
    whole, part = round(scale * seconds, places), round(scale * first, places)
    return f"{whole:.{places}f} {unit} = {part:.{places}f} {unit} + {whole - part:.{places}f} {unit}"


def percent_text(share: float) -> str:
    """A share of one as a percentage."""
    return f"{100 * share:.0f} %" if math.isfinite(share) else MISSING


def _digits(value: float) -> str:
    if value == int(value) and abs(value) < 1e4:
        return str(int(value))
    if 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:.{_places(value)}f}"


def _places(value: float) -> int:
    """Decimal places that leave three digits."""
    return min(4, max(0, 2 - math.floor(math.log10(abs(value))))) if value else 0
