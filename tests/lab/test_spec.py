"""Descriptions of a lab: what is read, and what is refused with which hint."""

from __future__ import annotations

import pytest

from thinwire.errors import ConfigError
from thinwire.lab import LabSpec


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 100e6), ("2.5gbit", 2.5e9), ("1500kbit", 1.5e6), ("5000000bit", 5e6), ("10Mbit", 10e6)],
)
def test_rates_are_decimal_bits_per_second(text: str, bits: float) -> None:
    assert LabSpec(rate=text).bits_per_second(0) == bits


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("100", "'100mbit'"),
        ("fast", "'100mbit'"),
        ("", "'100mbit'"),
        ("20mb", "'20mbit'"),
        ("20Mbps", "'20mbit'"),
        ("1g", "'1gbit'"),
        ("-5mbit", "'100mbit'"),
        ("0mbit", "nearest: '1mbit'"),
        ("900gbit", "nearest: '20gbit'"),
    ],
)
def test_a_wrong_rate_is_answered_with_a_valid_one(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        LabSpec(rate=text)


def test_delay_and_loss() -> None:
    spec = LabSpec(delay="250us", loss="0.1%")
    assert (spec.delay_s, spec.loss_percent) == (250e-6, 0.1)
    for wrong, hint in ("delay=10", "'10ms'"), ("delay=60s", "'10s'"), ("loss=1", "'1%'"), ("loss=100%", "'99%'"):
        with pytest.raises(ConfigError, match=hint):
            LabSpec.from_text(wrong)


def test_a_slow_node_has_its_own_rate() -> None:
    spec = LabSpec(nodes=3, rate="1gbit", slow={1: "20mbit"})
    assert [spec.bits_per_second(node) for node in range(3)] == [1e9, 20e6, 1e9]
    assert LabSpec(rate=None).bits_per_second(0) is None


def test_text_and_back() -> None:
    text = "nodes=4,rate=100mbit,local_size=2,slow=2:20mbit,slow=3:5mbit,delay=10ms,loss=0.1%"
    assert str(LabSpec.from_text(text)) == text
    assert LabSpec.from_text("") == LabSpec()
    assert LabSpec.from_text("rate=none, local-size=2") == LabSpec(rate=None, local_size=2)


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        LabSpec.from_text("nods=4,rate=fast,nodes=x,slow=9:20mbit,local_size=0,delay,slow=1")
    message = str(caught.value)
    for part in ("7 problems", "did you mean 'nodes'", "rate 'fast'", "nodes 'x'", "slow node 9", "local_size 0",
                 "write delay=VALUE", "slow '1'"):  # fmt: skip
        assert part in message
