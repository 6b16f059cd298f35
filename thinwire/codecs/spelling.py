"""How each class of codecs is written. The class states it as a decorator; `grammar` reads and writes by it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any, TypeVar

from thinwire.errors import ConfigError

# `base`, which defines it, imports this file.
Codec = Any
C = TypeVar("C", bound=type)
# Stands for another codec, among the texts that may follow a ":".
ANY = "CODEC"


@dataclass(frozen=True)
class Number:
    """A number between two strings, and the field that it sets.

    read, write: text of the number -> value of the field, and back. optional: `before` may stand alone.
    """

    field: str
    before: str
    after: str = ""
    read: Callable[[str], Any] = int
    write: Callable[[Any], str] = str
    optional: bool = False

    def settings(self, text: str) -> dict[str, Any] | None:
        """The field that the text sets, or None where the text is not of this form. Raises ConfigError."""
        if self.optional and text == self.before:
            return {}
        found = re.fullmatch(rf"{re.escape(self.before)}([0-9][0-9.]*){re.escape(self.after)}", text)
        try:
            return {self.field: self.read(found[1])} if found else None
        except ConfigError:
            raise
        except (ValueError, ArithmeticError):
            kind = "whole number" if self.read is int else "number"
            raise ConfigError(f"{text!r} can't be read: {self.field} must be a {kind}") from None

    def text(self, value: Any) -> str:
        return f"{self.before}{self.write(value)}{self.after}"

    def forms(self, default: Any) -> list[str]:
        """The texts that a user may write for it."""
        return [self.text(default)]


@dataclass(frozen=True)
class Word:
    """A word of several, and the field that it sets. choices: words, or words and the values that they stand for."""

    field: str
    choices: Sequence[str] | Mapping[str, Any]

    def settings(self, text: str) -> dict[str, Any] | None:
        """See Number."""
        return {self.field: self._values[text]} if text in self._values else None

    def text(self, value: Any) -> str:
        return next(word for word, meant in self._values.items() if meant == value)

    def forms(self, default: Any) -> list[str]:
        """See Number; the default comes first."""
        return sorted(self._values, key=lambda word: self._values[word] != default)

    @property
    def _values(self) -> dict[str, Any]:
        return dict(self.choices) if isinstance(self.choices, Mapping) else {word: word for word in self.choices}


@dataclass(frozen=True)
class Spelling:
    """How the codecs of a class are written: `head [/group] {:option}`, see `grammar`.

    Args:
        cls: the class; what a text leaves out has its default there.
        head: the name, or the number with the name around it.
        options: what may follow, each after a ":".
        sets: fields that the head sets without a number.
        group: the field of the number after "/".
        values: the field of another codec, which may be one of the options.
        wraps: the field of the codec that stands before the "+".
    """

    cls: type[Codec]
    head: Number | str
    options: tuple[Number | Word, ...] = ()
    sets: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    values: str | None = None
    wraps: str | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        """The values of the fields that a text does not set."""
        return {item.name: item.default for item in fields(self.cls)} | dict(self.sets)

    def head_settings(self, text: str) -> dict[str, Any] | None:
        """The fields that a head sets, or None where it is another codec's. Raises ConfigError."""
        if isinstance(self.head, Number):
            return self.head.settings(text)
        return dict(self.sets) if text == self.head else None

    def option_settings(self, text: str) -> dict[str, Any] | None:
        """The field that an option sets, or None where the class has no such option. Raises ConfigError."""
        return next((found for option in self.options if (found := option.settings(text)) is not None), None)

    def option_forms(self) -> list[str]:
        """The texts that may follow a ":"."""
        own = [form for option in self.options for form in option.forms(self.defaults[option.field])]
        return [*own, *([str(self.defaults[self.values]), ANY] if self.values else [])]

    def head_text(self, fields: Mapping[str, Any]) -> str:
        return self.head if isinstance(self.head, str) else self.head.text(fields[self.head.field])

    def text(self, codec: Codec) -> str:
        """The codec in this spelling: all of its numbers, and the options that are not the default."""
        given = {name: getattr(codec, name) for name in self.defaults}
        text = self.head_text(given) + (f"/{given[self.group]}" if self.group else "")
        if self.values and given[self.values] != self.defaults[self.values]:
            values = str(given[self.values])
            text += f":({values})" if re.search("[:+]", values) else f":{values}"
        for option in self.options:
            if given[option.field] != self.defaults[option.field]:
                text += f":{option.text(given[option.field])}"
        return f"{given[self.wraps]}+{text}" if self.wraps else text


SPELLINGS: list[Spelling] = []


def spelled(head: Number | str, *options: Number | Word, **rest: Any) -> Callable[[C], C]:
    """Class decorator: registers how a codec is written. rest: the other fields of Spelling."""

    def register(cls: C) -> C:
        SPELLINGS.append(Spelling(cls, head, options, **rest))
        return cls

    return register


def share_of(percent: str) -> float:
    """The share, 0.01, that a percentage, "1", stands for."""
    return float(Decimal(percent) / 100)


def percent_of(share: float) -> str:
    """The inverse of `share_of`, with every digit."""
    return format((Decimal(repr(float(share))) * 100).normalize(), "f")
