"""One grammar for codecs: `Codec.parse("int4/64:bf16+hadamard32")` reads it, and `str(codec)` writes it.

    codec  = part { "+" part }           what stands after a "+" is put around what stands before it
    part   = head [ "/" group ] { ":" option }
    head   = a name, mostly with a number in it: "int4", "e3m0", "topk1%", "sign", "hadamard32"
    group  = how many elements share a scale, compete for places or add up to sums
    option = a word ("bf16", "nearest"), a name with a number ("stride4"), or, for the values of a sparse codec, another
             codec: in parentheses where it holds a ":" or a "+" itself

Options may stand in any order. What is left out has the default of the codec's class. `str` writes every number, and
the options that are not the default, so that Codec.parse(str(codec)) == codec. Each class states its part by `spelled`.

A text means the same wherever it stands. A method that wants other defaults than the class writes them out as the
default of its own option: gradients between nodes may be "int4/64:bf16+hadamard32" unless the user says otherwise, and
a user who says "int4" there gets int4/128 with fp32 scales and no rotation, as everywhere. A method that can't work
with a codec refuses it by its traits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from thinwire.codecs.spelling import ANY, SPELLINGS, Number, Spelling
from thinwire.errors import ConfigError, nearest

# `base`, which defines it, imports this file.
Codec = Any


def read(text: str, fits: Callable[[Codec], bool] = lambda codec: True) -> Codec:
    """The codec that the text stands for. Raises ConfigError, which does not name the whole text.

    fits: of the codecs that the error suggests, where any does.
    """
    first, *around = _split(text, "+")
    codec = _read_part(first, None, fits)
    for part in around:
        codec = _read_part(part, codec)
    return codec


def write(codec: Codec) -> str:
    """The text that `read` turns into the codec; of a class without a spelling its repr."""
    for spelling in SPELLINGS:
        if spelling.cls is type(codec) and all(getattr(codec, name) == value for name, value in spelling.sets.items()):
            return spelling.text(codec)
    return repr(codec)


def _read_part(part: str, inner: Codec | None, fits: Callable[[Codec], bool] = lambda codec: True) -> Codec:
    """A codec without "+", or what stands after one, around `inner`."""
    first, *options = _split(part, ":")
    head, slash, group = first.partition("/")
    spelling, settings = _find(head)
    if spelling is None:
        choices = [spelling for spelling in SPELLINGS if bool(spelling.wraps) == (inner is not None)]
        heads = _heads(choices, head)
        fitting = heads if inner is not None else [choice for choice in heads if fits(_read_part(choice, None))]
        raise ConfigError(f"no codec is called {head!r}{nearest(head.lower(), fitting or heads)}")
    if spelling.wraps and inner is None:
        raise ConfigError(f"{head!r} must follow another codec; did you mean 'int4+{head}'?")
    if inner is not None:
        if not spelling.wraps:
            wrapping = _heads(choice for choice in SPELLINGS if choice.wraps)
            raise ConfigError(f"{head!r} can't follow a '+'; choose one of {', '.join(wrapping)}")
        settings[spelling.wraps] = inner
    if slash:
        settings |= _read_group(spelling, head, group)
    for option in options:
        found = _read_option(spelling, head, option)
        if twice := settings.keys() & found.keys():
            raise ConfigError(f"':{option}' sets the {twice.pop()} a second time; choose one")
        settings |= found
    return spelling.cls(**settings)


def _find(head: str) -> tuple[Spelling | None, dict[str, Any]]:
    """The spelling that a head belongs to, and what the head sets."""
    for spelling in SPELLINGS:
        if (settings := spelling.head_settings(head)) is not None:
            return spelling, settings
    return None, {}


def _read_group(spelling: Spelling, head: str, group: str) -> dict[str, Any]:
    if spelling.group is None:
        raise ConfigError(f"'/{group}' can't be read: {head} has no groups; did you mean {head!r}?")
    if not is_whole(group):
        default = spelling.defaults[spelling.group]
        raise ConfigError(f"'/{group}' can't be read: a group is a whole number; did you mean '{head}/{default}'?")
    return {spelling.group: int(group)}


def _read_option(spelling: Spelling, head: str, option: str) -> dict[str, Any]:
    found = spelling.option_settings(option)
    if found is not None:
        return found
    if spelling.values and option.startswith("("):
        return {spelling.values: read(option[1:].removesuffix(")"))}
    if spelling.values and _find(option.partition("/")[0])[0]:
        return {spelling.values: read(option)}
    if spelling.group and is_whole(option):
        raise ConfigError(f"':{option}' can't be read: a group follows a '/'; did you mean '{head}/{option}'?")
    forms = [form for form in spelling.option_forms() if form != ANY]
    hint = nearest(option, forms) if forms else f"; did you mean {head!r}?"
    hint += ", or another codec for its values" if spelling.values else ""
    raise ConfigError(f"':{option}' can't be read: {head} has no such option{hint}")


def is_whole(text: str) -> bool:
    """Whether the text is a whole number in the digits that `write` uses."""
    return text.isascii() and text.isdecimal()


def _heads(spellings: Iterable[Spelling], like: str = "") -> list[str]:
    """A valid head of each spelling, with the number of `like` where that gives one."""
    number = re.search("[0-9][0-9.]*", like)
    heads = []
    for spelling in spellings:
        heads.append(spelling.head_text(spelling.defaults))
        if number and isinstance(spelling.head, Number):
            head = f"{spelling.head.before}{number[0]}{spelling.head.after}"
            try:
                spelling.cls(**(spelling.head_settings(head) or {}))
                heads[-1] = head
            except ConfigError:
                continue
    return heads


def _split(text: str, at: str) -> list[str]:
    """The text cut at every `at` outside of parentheses. Raises ConfigError for a parenthesis without a partner."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            raise ConfigError("')' closes nothing")
        if letter == at and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise ConfigError("'(' is not closed")
    return parts
