"""Which codec lets gradients through that are a hundredth, or a thousandth, of others in their group."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from thinwire.codecs import Codec


@pytest.fixture(scope="module")
def small_gradients() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks/small_gradients.py"
    spec = importlib.util.spec_from_file_location("small_gradients", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_powers_of_two_close_the_gap_that_integers_leave(small_gradients: ModuleType) -> None:
    exact = small_gradients.distances(Codec.parse("fp32"))
    for text, gaps in {
        "e5m0/64:bf16": (0.02, 0.02, 0.02, 0.02),
        "e3m0/64:bf16": (0.02, 0.02, 0.1, 0.5),
    }.items():
        left = small_gradients.distances(Codec.parse(text))
        for plain, own, gap in zip(exact, left, gaps, strict=True):
            assert abs(own - plain) < gap, (text, left)
    drowned = small_gradients.distances(Codec.parse("int4/64:bf16+hadamard32"))
    assert drowned[2] - exact[2] > 0.3 and drowned[3] - exact[3] > 0.6, "the table in docs/methods/sdp4bit.md is old"
