"""Errors for settings that break a rule, in one form for all codecs: the value, the rule, the nearest valid choice."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.errors import ConfigError, nearest


def one_of(what: str, value: object, choices: Sequence[str]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{what} {value!r} is unknown{nearest(str(value), choices)}")


def width(what: str, value: int, choices: Sequence[int]) -> None:
    """Raises ConfigError unless `value` is one of the numbers `choices`."""
    if value not in choices:
        close = min(choices, key=lambda choice: abs(choice - value))
        raise ConfigError(f"{what} {value} is not one of {', '.join(map(str, choices))}; nearest is {close}")


def whole_number(what: str, value: int, least: int, most: int) -> None:
    """Raises ConfigError unless least <= value <= most."""
    if not least <= value <= most:
        close = min(max(value, least), most)
        raise ConfigError(f"{what} {value} is not a whole number from {least} to {most}; nearest is {close}")


def fraction(what: str, value: float, least: float) -> None:
    """Raises ConfigError unless least <= value <= 1."""
    if not least <= value <= 1:
        close = least if value < least else 1
        raise ConfigError(f"{what} {value} is not from {least:g} to 1; nearest is {close:g}, or {100 * close:g}%")
