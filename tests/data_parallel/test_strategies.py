"""Combinations that can't work are refused at construction, with the reason and a way out."""

from __future__ import annotations

import pytest

from thinwire import ConfigError, Hadamard, Identity, Integer, SDP4Bit
from thinwire.data_parallel import STRATEGIES, strategy_named
from thinwire.data_parallel.strategies import WireFormat


def test_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sdp4bit'"):
        strategy_named("sdp4bits")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight_bits": 5}, "nearest is 4"),
        ({"inter_group": 100}, "no multiple of the hadamard block_size 32; nearest is 96"),
        ({"hadamard": 33}, "not a power of two"),
        ({"rounding": "up"}, "rounding 'up'"),
        ({"weights": False, "gradients": False}, "compresses nothing"),
        ({"weight_bits": 2}, "grows in the next"),
    ],
)
def test_refused_options_say_why(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SDP4Bit(**options)


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
