"""Checks of options: each has the type that its dataclass declares, whether it comes from a flag, TOML or Python.

An option that chooses what travels is the text of a codec. A CodecRule states the traits that a method needs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from thinwire.codecs import Cast, Codec, Identity, grammar
from thinwire.errors import ConfigError, check_types as check_types, fits as fits, type_name


@dataclass(frozen=True)
class CodecRule:
    """A method's requirement on a codec, and the message for a codec that breaks it.

    chooses_rounding: a text that states no rounding stands for one that keeps the rule. nearest: what the message names
    where no other rounding helps; empty: the option's default.
    """

    holds: Callable[[Codec], bool]
    words: str
    chooses_rounding: bool = False
    nearest: str = ""


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
FIXED_SIZE = CodecRule(lambda codec: not codec.has_variable_length, "its packets must all have the size it promises")
# The text of the codec that loses nothing.
FP32 = str(Identity())
# The same, where a tensor travels in its own type.
EXACT = "exact"
# What a start-up table shows for None of `codec_or_none`.
AS_IT_IS = "as it is"


def codec_of(options: Any, field: str, *rules: CodecRule) -> Codec:
    """The codec that the text in a field of a dataclass describes.

    Raises ConfigError for a text that is no codec. For a codec that breaks one of the rules, the message names the
    nearest that keeps all of them.
    """
    text = getattr(options, field)
    what = f"{field} {text!r} of {type(options).__name__}"
    if not isinstance(text, str):
        raise ConfigError(f"{what}: must be {type_name(str)}")
    try:
        codec = _read(text, rules)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    for rule in rules:
        if rule.chooses_rounding and ":stochastic" not in text and not rule.holds(codec):
            codec = next((variant for variant in _variants(text) if rule.holds(variant)), codec)
    for rule in rules:
        if not rule.holds(codec):
            default = next(item.default for item in fields(options) if item.name == field)
            allowed = (str(variant) for variant in _variants(text) if all(rule.holds(variant) for rule in rules))
            raise ConfigError(f"{what}: {rule.words}; nearest: {next(allowed, rule.nearest or default)!r}")
    return codec


def codec_or_none(options: Any, field: str, *rules: CodecRule) -> Codec | None:
    """The same; None for fp32, or exact, which send a tensor as it is: what is in bf16 as bf16, in fewer bytes."""
    if getattr(options, field) == EXACT:
        return None
    codec = codec_of(options, field, *rules)
    return None if isinstance(codec, Identity) else codec


def with_feedback(options: Any, field: str, error_feedback: bool | None) -> tuple[Codec, bool]:
    """The codec of gradients in a field, and whether its losses are kept and sent later.

    error_feedback: the user's choice; None: yes, unless the codec is unbiased. Raises ConfigError as `codec_of` does:
    with feedback the codec must be a contraction, without it unbiased.
    """
    kept = not codec_of(options, field).traits.unbiased if error_feedback is None else error_feedback
    return codec_of(options, field, CONTRACTION if kept else UNBIASED), kept


@functools.cache
def _read(text: str, rules: tuple[CodecRule, ...] = ()) -> Codec:
    """The codec of a text. Raises ConfigError, which suggests what keeps the rules, at least with other rounding."""
    return grammar.read(
        text, lambda codec: any(all(rule.holds(each) for rule in rules) for each in (codec, *_variants(str(codec))))
    )


def _variants(text: str) -> Iterator[Codec]:
    """The codec with its options of rounding changed, and without entropy coding."""
    first, plus, around = text.replace(":stochastic", "").partition("+")
    for ending in dict.fromkeys((plus + around, re.sub(r"\+(zstd|rows)\d*", "", plus + around))):
        for word in (":nearest", ":biased"):
            for changed in (first.replace(word, ""), first + word):
                try:
                    yield _read(changed + ending)
                except ConfigError:
                    continue
