"""Reads `NAME[option=value,...]`, the form of optimizers and of the contestants of a race."""

from __future__ import annotations

import tomllib
from typing import Any

from thinwire.errors import ConfigError


def split(text: str, note: str) -> list[str]:
    """Split a text at commas outside of brackets and quotes. Raises ConfigError if one is not closed.

    note: the beginning of the error message.
    """
    parts, depth, quote = [""], 0, ""
    for char in text:
        if char == "," and not depth and not quote:
            parts.append("")
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char == "[") - (char == "]")
        parts[-1] += char
    if depth or quote:
        raise ConfigError(f"{note}{'a bracket' if depth else 'a quote'} is not closed")
    return parts


def options_in(text: str, note: str) -> dict[str, Any]:
    """The options in `option=value,...` by name, each value read as TOML; a word without quotes is a string.

    Raises ConfigError, which begins with `note`, for a part that is something else.
    """
    found = {}
    for part in filter(None, map(str.strip, split(text, note))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ConfigError(f"{note}{part!r} must be option=value")
        try:
            found[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    return found
