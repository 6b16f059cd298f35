"""Every codec against the conformance suite."""

from __future__ import annotations

import importlib

import pytest
import torch
from numba.core.dispatcher import Dispatcher

from tests.conformance.codec_suite import CASES, CodecSuite, gaussian
from thinwire.codecs import warm


@pytest.mark.parametrize("case", CASES, ids=str)
class TestCodecs(CodecSuite):
    pass


def num_compiled() -> int:
    """Compiled signatures of every kernel."""
    names = ["integer", "grouped", "sparse", "sketch", "normals"]
    modules = [importlib.import_module(f"thinwire.codecs.kernels.{name}") for name in names]
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
    assert len(kernels) > 10
    return sum(len(kernel.signatures) for kernel in kernels)


def test_warm_leaves_nothing_to_compile() -> None:
    codecs = [case.codec for case in CASES]
    warm(codecs)
    before = num_compiled()
    for codec in codecs:
        codec.decode_add(codec.encode(gaussian(777), seed=2**63 + 1, counter=2**40), torch.zeros(777))
        if rotation := codec.rotation:
            rotation.inner.decode(codec.encode(gaussian(5)), -(-5 // rotation.block_size) * rotation.block_size)
    assert num_compiled() == before
