"""Reads command lines by tyro, and says what is wrong with one as every other error of the user is said."""

from __future__ import annotations

import io
import types
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from thinwire.errors import ConfigError, nearest, type_name

# What stands around tyro's messages.
FRAME, TITLE = "│╰╯─ ", "╭"


def parse_flags(cls: type, args: Sequence[str], problems: Sequence[str] = (), **options: Any) -> Any:
    """An object of the dataclass `cls` from flags; options: tyro's.

    Raises ConfigError with `problems`, found before, and every value that can't be read; SystemExit after --help.
    """
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(cls, args=list(args), **options)
    except SystemExit as stop:
        if not stop.code:
            raise
    wrong = [*unreadable(cls, args)] or [_words(said.getvalue())]
    raise ConfigError.of([*problems, *wrong])


def unreadable(cls: type, args: Sequence[str]) -> Iterator[str]:
    """One message for each flag of `cls` whose value is missing or can't be read."""
    words = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    for name, value in pairwise([*words, "--"]):
        hint, default = _declared(cls, name.removeprefix("--").replace("-", "_").split("."))
        if not name.startswith("--") or hint in (None, bool):
            continue
        example = "" if default in (MISSING, None, ()) else f", such as {default}"
        if value.startswith("--"):
            yield f"{name}: needs a value, {type_name(hint)}{example}"
        elif not _can_be(value, hint):
            close = nearest(value, map(str, get_args(hint))) if get_origin(hint) is Literal else example
            yield f"{name} {value}: must be {type_name(hint)}{close}"


def _declared(cls: type, path: list[str]) -> tuple[Any, Any]:
    """(Type, default) of the field behind a flag; a field that is a dataclass goes by its name, or by none."""
    hints, defaults = get_type_hints(cls), {item.name: item.default for item in fields(cls)}
    name, *rest = path
    if not rest and name in hints:
        return hints[name], defaults[name]
    inner = [(hints[name], rest)] if name in hints else [(hint, path) for hint in hints.values()]
    found = (_declared(hint, below) for hint, below in inner if is_dataclass(hint) and isinstance(hint, type) and below)
    return next((answer for answer in found if answer[0] is not None), (None, MISSING))


def _can_be(value: str, hint: Any) -> bool:
    """Whether a flag's value can stand for this type."""
    if get_origin(hint) in (Union, types.UnionType):
        return any(_can_be(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in map(str, get_args(hint))
    if hint is types.NoneType:
        return value == "None"
    if hint is bool:
        return value in ("True", "False")
    if hint not in (int, float):
        return True
    try:
        hint(value)
    except ValueError:
        return False
    return True


def _words(text: str) -> str:
    """What a framed message says, in one line: neither its title nor where help is."""
    lines = [line.strip(FRAME) for line in text.splitlines() if not line.startswith(TITLE)]
    return " ".join(filter(None, lines)).partition(" For full help")[0]
