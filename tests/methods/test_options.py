"""Combinations that can't work are refused at construction, with the reason and a way out."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from thinwire import (
    DGC,
    EF21,
    ConfigError,
    ExpertParallel,
    Frontier,
    Hadamard,
    Identity,
    Integer,
    Pipeline,
    SDP4Bit,
    SequenceParallel,
    ZeroPP,
)
from thinwire.layout.formats import WireFormat
from thinwire.methods.memory import Residency
from thinwire.methods.options import fits
from thinwire.methods.pipeline.border import Crossing
from thinwire.registry import STRATEGIES, strategy_named


def test_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sdp4bit'"):
        strategy_named("sdp4bits")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "int5"}, "weights 'int5' of SDP4Bit: .*nearest is 4"),
        ({"inter_gradients": "int4/100+hadamard32"}, "no multiple of the hadamard block_size 32; nearest is 96"),
        ({"intra_gradients": "int4/99+hadamard33"}, "not a power of two"),
        ({"vector_gradients": "int8:up"}, "vector_gradients 'int8:up' of SDP4Bit: ':up' can't be read"),
        (dict.fromkeys((item.name for item in fields(SDP4Bit) if item.type == "str"), "fp32"), "compresses nothing"),
        ({"weights": "int2/2048"}, "grows in the next"),
        ({"loco_beta": 0.5}, "changes nothing without loco; nearest: "),
        (
            {"loco": True} | dict.fromkeys(("intra_gradients", "inter_gradients", "vector_gradients"), "fp32"),
            "loco of SDP4Bit feeds nothing back",
        ),
    ],
)
def test_refused_options_say_why(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SDP4Bit(**options)


def test_every_option_has_a_type_that_is_checked() -> None:
    made: dict[Any, Any] = {type(strategy): strategy for strategy in (make() for make in STRATEGIES.values())}
    for cls, strategy in made.items():
        hints = get_type_hints(cls)
        for item in fields(cls) if is_dataclass(cls) else ():
            for wrong in ({1}, "no", True, 2.5):
                if not fits(wrong, hints[item.name]):
                    with pytest.raises(ConfigError, match=rf"{item.name} .* of {cls.__name__}|can't plan"):
                        replace(strategy, **{item.name: wrong})


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (ZeroPP, {"secondary": "yes"}, "secondary 'yes' of ZeroPP: must be true or false"),
        (ZeroPP, {"weights": 8}, "weights 8 of ZeroPP: must be a string"),
        (ZeroPP, {"loco_reset": 2048.0}, "loco_reset 2048.0 of ZeroPP: must be a whole number"),
        (Frontier, {"weights_over": "2"}, "weights_over '2' of Frontier: must be a whole number"),
        (DGC, {"warmup": ("a",)}, r"warmup \('a',\) of DGC: must be a list of numbers"),
    ],
)
def test_options_of_a_wrong_type_are_named(cls: type, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cls(**options)


def test_fp32_sends_a_tensor_as_it_is() -> None:
    x = torch.randn(6, 10).bfloat16()
    packet = Crossing("fp32", "bf16").pack("forward", x, 0, 0)
    assert packet.numel() == 2 * x.numel() == Crossing().packet_bytes("forward", x.numel(), x.dtype)
    assert torch.equal(Crossing().unpack("forward", packet, x.shape, x.dtype), x)
    assert Crossing("exact", "bf16").pack("forward", x, 0, 0).numel() == 2 * x.numel()
    assert SequenceParallel(4, method="auto", wire="exact").codecs == ()
    # Nothing travels there, so its word is no wish.
    assert ExpertParallel(move="experts", dispatch="exact").codecs == ()
    for options in (Pipeline(forward="fp32"), SequenceParallel(2, wire="fp32"), ExpertParallel(dispatch="fp32")):
        assert not any(isinstance(codec, Identity) for codec in options.codecs)


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (SequenceParallel, {"gradients": "int8/64+zstd"}, "all have the size it promises; nearest: 'int8/64'"),
        (SequenceParallel, {"wire": "int8/64:stochastic+zstd"}, "not at random; nearest: 'int8/64:nearest'"),
        (EF21, {"codec": "exact"}, "codec 'exact' of EF21: no codec is called 'exact'"),
        (ExpertParallel, {"dispatch": "exactly"}, "dispatch 'exactly' of ExpertParallel: no codec is called"),
        (Residency, {"masters": "fp64"}, "no codec is called 'fp64'; did you mean 'fp32'"),
        (Residency, {"states": "itn8/64"}, "no codec is called 'itn8'; did you mean 'int8'"),
        (Pipeline, {"forward": 8}, "forward 8 of Pipeline: must be a string$"),
        (EF21, {"codec": "topk1%+zstd"}, "all have the size it promises; nearest: 'topk1%"),
    ],
)
def test_a_codec_that_can_not_travel_there_is_refused_with_the_nearest(cls: type, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cls(**options)


def test_numbers_of_numpy_are_numbers() -> None:
    options: dict[str, Any] = {"loco": True, "loco_reset": np.int64(64), "loco_beta": np.float32(0.5)}
    assert ZeroPP(**options).loco_reset == 64
    lists: dict[str, Any] = {"clip": 1, "warmup": [0.25]}
    assert DGC(**lists).density_at(0) == 0.25


def test_a_lossy_codec_may_carry_differences_if_what_it_loses_shrinks() -> None:
    exact = Identity()
    for codec in (Integer(2, 2048, "nearest"), Integer(2, 32), Integer(4, 2048), Hadamard(Integer(3, 2048))):
        WireFormat(codec, True, exact, exact)
    with pytest.raises(ConfigError):
        WireFormat(Integer(2, 2048), True, exact, exact)
    WireFormat(Integer(2, 2048), False, exact, exact)


def test_each_half_alone() -> None:
    first, second = STRATEGIES["sdp4bit-weights"](), STRATEGIES["sdp4bit-gradients"]()
    assert isinstance(first, SDP4Bit) and isinstance(second, SDP4Bit)
    weights, gradients = first.matrix(), second.matrix()
    assert weights.differences
    assert weights.inter == weights.intra == Identity()
    assert not gradients.differences
    assert gradients.weights == Identity()
    assert gradients.inter.bits_per_element == 4.25
