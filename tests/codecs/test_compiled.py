"""What CUDA runs under torch.compile, traced here without a compiler: whole graphs, the reference's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.codec_suite import gaussian, same_bits
from thinwire.codecs import Codec, Hadamard, Integer, backends

CODECS: list[Any] = [
    # Its operations are those of the rotated one, too.
    pytest.param(Integer(4, 128, "stochastic"), marks=pytest.mark.whole),
    Integer(8, 64, "nearest", "bf16"),
    Integer(3, 50, "nearest"),
    Hadamard(Integer(4, 64, "stochastic", "bf16")),
]


@pytest.fixture
def compiled_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's CPU tensors take the way of CUDA's; "aot_eager" traces as inductor does and needs no C++ compiler."""
    monkeypatch.setattr(backends, "cpu_kernels", lambda: None)
    monkeypatch.setattr(backends, "COMPILED", {"cpu": "aot_eager"})
    backends._compiled.cache_clear()


@pytest.mark.usefixtures("compiled_on_cpu")
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_traced_codecs_give_the_reference_bits_at_any_size(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    for num_elements in (2 * codec.block, 3 * codec.block + 7, 5 * codec.block, codec.block, 5):
        x, seed = gaussian(num_elements), 2**63 + 5
        packet, total = codec.encode(x, seed=seed, counter=2**32 - 100), x.clone()
        fast = packet, codec.decode(packet, num_elements), codec.decode_add(packet, total)
        with monkeypatch.context() as plain:
            plain.setattr(backends, "COMPILED", {})
            assert torch.equal(packet, codec.encode(x, seed=seed, counter=2**32 - 100))
            assert same_bits(fast[1], codec.decode(packet, num_elements))
            assert same_bits(fast[2], codec.decode_add(packet, x.clone()))


@pytest.mark.usefixtures("compiled_on_cpu")
def test_traced_rotations_keep_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Hadamard(Integer(4, 64, "stochastic", "bf16"))
    x = gaussian(5 * 64 + 7)
    zeros = x > 0.8
    zeros[64:192] = False
    packet = codec.encode(x.masked_fill_(zeros, 0.0), seed=3)
    assert not codec.decode(packet, x.numel())[zeros].any()
    monkeypatch.setattr(backends, "COMPILED", {})
    assert torch.equal(packet, codec.encode(x, seed=3))


@pytest.mark.usefixtures("compiled_on_cpu")
def test_each_format_is_compiled_by_itself_and_sizes_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(backends, "COMPILED", {"cpu": count})
    compiled_for = {}
    for bits in (2, 3, 8):
        before = len(graphs)
        for num_groups in (2, 3, 5, 8, 13):
            Integer(bits, 64).encode(gaussian(64 * num_groups))
        compiled_for[bits] = len(graphs) - before
    # Once for the first size, once for all that follow; were formats to share code, widths would become variables.
    assert compiled_for == dict.fromkeys((2, 3, 8), 2)
