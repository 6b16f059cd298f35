"""Checks of options: each has the type that its dataclass declares, whether it comes from a flag, TOML or Python.

An option that chooses what travels is the text of a codec. A CodecRule states the traits that a method needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.codecs import Cast, Codec, Identity, grammar
from thinwire.errors import ConfigError, type_name

# Python counts booleans as numbers, but no user means them so.
NUMBERS: dict[Any, type] = {int: Integral, float: Real}


def check_types(options: Any) -> None:
    """Raise ConfigError for the first field of a dataclass whose value does not have the declared type.

    Without this check, "no" would be true, and 2.5 bits or a group of True would fail much later.
    """
    hints = get_type_hints(type(options))
    for item in fields(options):
        value = getattr(options, item.name)
        if not fits(value, hints[item.name]):
            what = f"{item.name} {value!r} of {type(options).__name__}"
            raise ConfigError(f"{what}: must be {type_name(hints[item.name])}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is valid for a field of this type. A whole number fits any number, a list fits a tuple."""
    if get_origin(hint) in (Union, UnionType):
        return any(fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(fits(item, get_args(hint)[0]) for item in value)
    if hint in NUMBERS:
        return isinstance(value, NUMBERS[hint]) and not isinstance(value, bool)
    return isinstance(value, hint)


@dataclass(frozen=True)
class CodecRule:
    """A method's requirement on a codec, and the message for a codec that breaks it.

    chooses_rounding: a text that states no rounding stands for one that keeps the rule.
    """

    holds: Callable[[Codec], bool]
    words: str
    chooses_rounding: bool = False


FLOAT = CodecRule(
    lambda codec: codec in (Identity(), Cast("bf16")), "must be fp32 or bf16, which can be summed as they travel"
)
CONTRACTION = CodecRule(
    lambda codec: codec.traits.contraction,
    "error feedback needs a contraction: if more is lost than sent, the error grows without bound",
)
UNBIASED = CodecRule(
    lambda codec: codec.traits.unbiased,
    "without error feedback it must be unbiased, so that losses cancel out in the mean",
)
REPEATABLE = CodecRule(
    lambda codec: codec.traits.contraction and (codec.traits.lossless or not codec.traits.unbiased),
    "weights are gathered more than once and must be rounded the same way each time, not at random",
)


SAME_EACH_TIME = CodecRule(
    REPEATABLE.holds, "a forward that is recomputed must be rounded the same way, not at random", chooses_rounding=True
)
# What an option states in place of a codec for a tensor's own bytes in its own dtype.
EXACT = "exact"


def codec_of(options: Any, field: str, rule: CodecRule | None = None) -> Codec:
    """The codec that the text in a field of a dataclass describes.

    Raises ConfigError for a text that is no codec. For a codec that breaks the rule, the message names the nearest
    valid one.
    """
    text = getattr(options, field)
    what = f"{field} {text!r} of {type(options).__name__}"
    try:
        codec = _read(text)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    if rule and rule.chooses_rounding and ":stochastic" not in text and not rule.holds(codec):
        codec = next((variant for variant in _variants(text) if rule.holds(variant)), codec)
    if rule and not rule.holds(codec):
        default = next(item.default for item in fields(options) if item.name == field)
        allowed = (str(variant) for variant in _variants(text) if rule.holds(variant))
        raise ConfigError(f"{what}: {rule.words}; nearest: {next(allowed, default)!r}")
    return codec


def codec_or_exact(options: Any, field: str, rule: CodecRule | None = None) -> Codec | None:
    """The same, or None for EXACT; a codec whose packets have no fixed size is refused."""
    text = getattr(options, field)
    if text == EXACT:
        return None
    try:
        codec = codec_of(options, field, rule)
    except ConfigError as error:
        raise ConfigError(f"{error}, or {EXACT!r}") from None
    if codec.has_variable_length:
        raise ConfigError(f"{field} {text!r}: its packets have no fixed size; nearest: 'int8/64:nearest'")
    return codec


def with_feedback(options: Any, field: str, error_feedback: bool | None) -> tuple[Codec, bool]:
    """The codec of gradients in a field, and whether its losses are kept and sent later.

    error_feedback: the user's choice; None: yes, unless the codec is unbiased. Raises ConfigError as `codec_of` does:
    with feedback the codec must be a contraction, without it unbiased.
    """
    kept = not codec_of(options, field).traits.unbiased if error_feedback is None else error_feedback
    return codec_of(options, field, CONTRACTION if kept else UNBIASED), kept


_read = functools.cache(grammar.read)


def _variants(text: str) -> Iterator[Codec]:
    """The codec with its options of rounding changed."""
    first, plus, around = text.replace(":stochastic", "").partition("+")
    for word in (":nearest", ":biased"):
        for changed in (first.replace(word, ""), first + word):
            try:
                yield _read(changed + plus + around)
            except ConfigError:
                continue
