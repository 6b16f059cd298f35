"""Options have the types that their dataclass declares, whoever makes it: a flag, a TOML table, a program."""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.errors import ConfigError, type_name

# Booleans are numbers to Python, and never meant as such.
NUMBERS: dict[Any, type] = {int: Integral, float: Real}


def check_types(options: Any) -> None:
    """Raise ConfigError for the first field of a dataclass whose value has another type than the field declares.

    "no" is true, and 2.5 bits or a group of True would go a long way before anything is wrong.
    """
    hints = get_type_hints(type(options))
    for item in fields(options):
        value = getattr(options, item.name)
        if not fits(value, hints[item.name]):
            what = f"{item.name} {value!r} of {type(options).__name__}"
            raise ConfigError(f"{what}: must be {type_name(hints[item.name])}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value may stand for a field of this type: a whole number for any number, a list for a tuple."""
    if get_origin(hint) in (Union, UnionType):
        return any(fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(fits(item, get_args(hint)[0]) for item in value)
    if hint in NUMBERS:
        return isinstance(value, NUMBERS[hint]) and not isinstance(value, bool)
    return isinstance(value, hint)
