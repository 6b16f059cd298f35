"""The text of codecs: what it means, and what a wrong one is answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from typing import Any

import pytest

from thinwire.codecs import (
    Cast,
    Codec,
    CountSketch,
    Hadamard,
    Identity,
    Integer,
    Natural,
    RandomK,
    Sign,
    Threshold,
    TopK,
    Zstd,
)
from thinwire.codecs.spelling import SPELLINGS
from thinwire.errors import ConfigError

# Other values than the default, of every option that a codec has.
OTHERS: dict[str, list[Any]] = {
    "dtype": ["bf16", "fp16"],
    "bits": [3, 8],
    "group": [96, 1024],
    "rounding": ["nearest", "stochastic"],
    "scale": ["bf16", "fp32"],
    "norm": ["l1", "l2"],
    "density": [0.25, 1 / 3, 0.0123, 1.0],
    "stride": [1, 7],
    "every": [2, 3, 100],
    "ratio": [2, 32],
    "unbiased": [True, False],
    "values": [Identity(), Integer(8, 16, "nearest", "bf16"), Hadamard(Integer()), TopK(0.5)],
    "inner": [Identity(), Zstd(Sign()), TopK(0.1, 64, RandomK(2, Cast("fp16")))],
    "repeated": [Sign(32, "l2"), Hadamard(Natural(8))],
    "coded": [Sign(32, "l2"), Hadamard(Natural(8))],
    "block_size": [2, 64],
    "level": [1, 19],
    "width": [128, 384],
}


@pytest.mark.parametrize("cls", dict.fromkeys(spelling.cls for spelling in SPELLINGS), ids=lambda cls: cls.__name__)
def test_every_option_of_every_codec_can_be_written(cls: type) -> None:
    names = [item.name for item in fields(cls)]
    for values in product(*(OTHERS[name] for name in names)):
        codec = cls(**dict(zip(names, values, strict=True)))
        assert Codec.parse(str(codec)) == codec, str(codec)


def test_all_codecs_have_a_text() -> None:
    spelled = {spelling.cls for spelling in SPELLINGS}
    assert spelled == {cls for cls in every_codec(Codec) if not cls.__abstractmethods__}  # type: ignore[attr-defined]


def every_codec(cls: type) -> Iterator[type]:
    if cls.__module__.startswith("thinwire.codecs."):
        yield cls
    derived: type
    for derived in cls.__subclasses__():
        yield from every_codec(derived)


@pytest.mark.parametrize("every", range(2, (1 << 14) + 1, 113))
def test_a_random_one_of_any_number_can_be_written(every: int) -> None:
    assert Codec.parse(str(RandomK(every))) == RandomK(every)


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("fp32", Identity()),
        ("bf16", Cast("bf16")),
        ("int4", Integer(4, 128, "stochastic", "fp32")),
        ("int4/64:bf16+hadamard32", Hadamard(Integer(4, 64, "stochastic", "bf16"), 32)),
        ("int4/64:nearest:bf16", Integer(4, 64, "nearest", "bf16")),
        ("e3m0", Natural(4)),
        ("sign/64:l2", Sign(64, "l2")),
        ("topk", TopK(0.01)),
        ("topk25%/64", TopK(0.25, 64)),
        ("topk0.1%:int8/16", TopK(0.001, values=Integer(8, 16))),
        ("topk10%:(int8/32:bf16+hadamard32)+zstd", Zstd(TopK(0.1, values=Hadamard(Integer(8, 32, scale="bf16"))))),
        ("threshold1%/1024:fp32:stride8", Threshold(0.01, 1024, Identity(), 8)),
        ("randomk1%:biased", RandomK(100, unbiased=False)),
        ("randomk33.3%", RandomK(3)),
        ("countsketch16:unbiased", CountSketch(16)),
        ("int8+zstd3", Zstd(Integer(8), 3)),
    ],
)
def test_texts(text: str, codec: Codec) -> None:
    assert Codec.parse(text) == codec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "codec '': no codec is called ''; choose one of bf16"),
        ("itn8/64", "codec 'itn8/64': no codec is called 'itn8'; did you mean 'int8'"),
        ("int", "did you mean 'int4'"),
        ("int5/64", "codec 'int5/64': integer bits 5 is not one of 2, 3, 4, 6, 8; nearest is 4"),
        ("int4.5", "bits must be a whole number"),
        ("int4/x", "'/x' can't be read: a group is a whole number; did you mean 'int4/128'"),
        ("bf16/64", "'/64' can't be read: bf16 has no groups; did you mean 'bf16'"),
        ("int4:bf61", "':bf61' can't be read: int4 has no such option; did you mean 'bf16'"),
        ("int4:", "':' can't be read: int4 has no such option; choose one of bf16, fp32, nearest, stochastic"),
        ("fp32:bf16", "fp32 has no such option; did you mean 'fp32'"),
        ("int4:bf16:fp32", "':fp32' sets the scale a second time"),
        ("topk1", "did you mean 'topk1%'"),
        ("topk200%", "topk density 2.0 is not from .* nearest is 1, or 100%"),
        ("topk\uff11%", "no codec is called"),
        ("int\u0664", "no codec is called"),
        ("int4/\u0664", "a group is a whole number"),
        ("INT4/64", "no codec is called 'INT4'; did you mean 'int4'"),
        ("int4:64", "':64' can't be read: a group follows a '/'; did you mean 'int4/64'"),
        ("topk1..2%", "density must be a number"),
        ("topk1%:(int8:bf16", r"'\(' is not closed"),
        ("topk1%:int5", "integer bits 5"),
        ("topk1%:bf16:fp16", "':fp16' sets the values a second time"),
        ("topk1%:sgin", "':sgin' can't be read"),
        ("int4)", r"'\)' closes nothing"),
        ("threshold1%:sride8", "did you mean 'stride32'"),
        ("randomk40%", "randomk 40%: must be 1 of a whole number .* nearest is 50%"),
        ("hadamard32", "'hadamard32' must follow another codec; did you mean 'int4.hadamard32'"),
        ("int4+int4", "'int4' can't follow a '.'; choose one of hadamard32, rows128, twice, zstd1"),
        ("int4+hadmard", "did you mean 'hadamard32'"),
        ("int4/100+hadamard32", "integer group 100 is no multiple of the hadamard block_size 32; nearest is 96"),
        ("int4+zstd33", "zstd level 33: must be 1 to 19"),
    ],
)
def test_a_wrong_text_names_itself_the_rule_and_what_is_near(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Codec.parse(text)
    assert repr(text) in str(error.value)
