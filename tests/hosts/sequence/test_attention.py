"""Attention over several ranks equals that of one process, outputs and gradients, for every way to share it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.workers import run_workers
from thinwire.codecs import Codec
from thinwire.collectives import Communicator
from thinwire.errors import ConfigError
from thinwire.hosts.sequence import blocks
from thinwire.hosts.sequence.attention import HeadExchange, sequence_attention, ulysses_attention, whole_attention
from thinwire.hosts.sequence.ring import ring_attention
from thinwire.hosts.sequence.wire import SequenceWire
from thinwire.methods.sequence import SequenceLayout, Shape, sent, tokens_of

RANKS, BATCH, WIDTH = 4, 2, 16
# SequenceLayout, heads, key heads, whether the mask is causal.
CASES = [
    (SequenceLayout(ulysses, ring), heads, kv_heads, is_causal)
    for ulysses, ring, heads, kv_heads, is_causal in [
        (4, 1, 8, 8, True), (4, 1, 7, 7, True), (4, 1, 8, 2, True), (4, 1, 6, 2, True), (4, 1, 4, 4, False),
        (1, 4, 4, 2, True), (1, 4, 2, 1, False), (2, 2, 4, 2, True), (2, 2, 3, 3, False),
    ]
]  # fmt: skip
LENGTH = 48
# Where documents of the two sequences end: inside a chunk, at a border of chunks, and across several. With 4 groups in
# a ring, chunks have 6 tokens: no rank of the second sequence has later tokens of another's documents but one.
BOUNDS = ([0, 3, 4, 12, 31, 48], [0, 6, 12, 18, 24, 30, 36, 40, 48])
# Values narrower than keys, as in attention by latent vectors, and wider.
UNLIKE, VALUES = [CASES[5], CASES[0], CASES[7]], {"narrow": 8, "wide": 24}
PACKED = [case for case in CASES if case[0].ring > 1] + [CASES[2]]


def inputs(
    heads: int, kv_heads: int, dtype: torch.dtype = torch.float64, values: int = WIDTH
) -> tuple[Tensor, ...]:  # fmt: skip
    """q, k, v and the gradient of the output, of whole sequences. values: width of v and of the output."""
    draw = torch.Generator().manual_seed(heads)
    sizes = (heads, WIDTH), (kv_heads, WIDTH), (kv_heads, values), (heads, values)
    return tuple(torch.randn(BATCH, n, LENGTH, d, generator=draw, dtype=torch.float64).to(dtype) for n, d in sizes)


def alone(
    heads: int, kv_heads: int, is_causal: bool, is_packed: bool = False, values: int = WIDTH
) -> list[Tensor]:  # fmt: skip
    """Output and gradients of one process, by plain products."""
    q, k, v, grad = (x.requires_grad_() for x in inputs(heads, kv_heads, values=values))
    group = heads // kv_heads
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) / WIDTH**0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    if is_packed:
        scores = scores.masked_fill(~same_document()[:, None], -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())]


def same_document() -> Tensor:
    """Whether two tokens of a sequence are of one document: bool [batch, tokens, tokens]."""
    places = torch.arange(LENGTH)
    numbers = torch.stack([torch.bucketize(places, torch.tensor(row[1:]), right=True) for row in BOUNDS])
    return numbers[:, :, None] == numbers[:, None]


def share(rank: int, world_size: int) -> dict[str, Any]:
    # Checked: both sides of a message must agree on its operation, level and size.
    comm = Communicator(local_size=2, checked=True)
    found: dict[str, Any] = {"cases": [], "packed": [], **{kind: [] for kind in VALUES}}
    kinds = [("cases", CASES, ()), ("packed", PACKED, BOUNDS), *((kind, UNLIKE, ()) for kind in VALUES)]
    for kind, cases, bounds in kinds:
        for number, (layout, heads, kv_heads, is_causal) in enumerate(cases):
            own = tokens_of(layout, rank, LENGTH)
            whole = inputs(heads, kv_heads, values=VALUES.get(kind, WIDTH))
            q, k, v, grad = (x[:, :, own].requires_grad_() for x in whole)
            before = comm.meter.snapshot().sent_bytes
            out = sequence_attention(q, k, v, SequenceWire(comm), layout, is_causal=is_causal, bounds=bounds)
            grads = torch.autograd.grad(out, (q, k, v), grad.detach())
            spent = comm.meter.snapshot().sent_bytes - before
            found[kind].append((number, own, [out.detach(), *grads], spent))
    for wrong in (BOUNDS[:1], (BOUNDS[0], [0, 9, 7, 48]), (BOUNDS[0], [0, 47])):
        with pytest.raises(ConfigError, match="bounds of documents"):
            ring_attention(q, k, v, comm, bounds=wrong)
    found["fp32"] = in_fp32(comm, rank)
    found["bf16"] = in_bf16(comm, rank)
    found["lossy"] = lossy(comm, rank)
    found["bytes"] = dossier_bytes(comm, rank)
    comm.close()
    return found


def in_fp32(comm: Communicator, rank: int) -> list[float]:
    """The largest errors of heads over two and over four ranks: of outputs and gradients."""
    wire, errors = SequenceWire(comm), list[float]()
    for ranks, heads in itertools.product((2, 4), (4, 8)):
        first = rank - rank % ranks
        own = tokens_of(SequenceLayout(ranks, 1), rank - first, LENGTH)
        q, k, v, grad = (x[:, :, own].requires_grad_() for x in inputs(heads, heads, torch.float32))
        out = ulysses_attention(q, k, v, wire, members=range(first, first + ranks))
        found = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())]
        pairs = zip(found, alone(heads, heads, True), strict=True)
        errors += [float((result - expected[:, :, own]).abs().max()) for result, expected in pairs]
    return errors


def in_bf16(comm: Communicator, rank: int) -> dict[str, list[float]]:
    """The relative errors of a ring of bf16 messages, and of bf16 throughout; and of one process in bf16."""
    layout, truth, found = SequenceLayout(1, RANKS), alone(4, 2, True), dict[str, list[float]]()
    codec = Codec.parse("bf16")
    exact, rounded = SequenceWire(comm), SequenceWire(comm, codec, codec)
    ways = ("wire", torch.float32, rounded), ("dtype", torch.bfloat16, exact), ("plain", torch.bfloat16, None)
    for name, dtype, wire in ways:
        own = torch.arange(LENGTH) if wire is None else tokens_of(layout, rank, LENGTH)
        q, k, v, grad = (x[:, :, own].requires_grad_() for x in inputs(4, 2, dtype))
        before = comm.meter.snapshot().sent_bytes
        out = whole_attention(q, k, v, True) if wire is None else ring_attention(q, k, v, wire)
        results = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())]
        assert all(each.dtype == dtype for each in results)
        # Both ways send two bytes a number.
        spent, bf16 = comm.meter.snapshot().sent_bytes - before, Shape(4, 2, WIDTH, BATCH * LENGTH, itemsize=2)
        assert wire is None or spent == sum(n for (source, _), n in sent(layout, bf16).items() if source == rank)
        pairs = [(result.double(), expected[:, :, own]) for result, expected in zip(results, truth, strict=True)]
        found[name] = [float((a - b).norm() / b.norm()) for a, b in pairs]
    return found


def lossy(comm: Communicator, rank: int) -> dict[str, Any]:
    results = {}
    wire = SequenceWire(comm, Codec.parse("int8/64:nearest"), Codec.parse("int8/64"))
    for layout in (SequenceLayout(4, 1), SequenceLayout(1, 4)):
        own = tokens_of(layout, rank, LENGTH)
        q, k, v, grad = (x[:, :, own].float().requires_grad_() for x in inputs(4, 4))
        before = comm.meter.snapshot().sent_bytes
        out = sequence_attention(q, k, v, wire, layout)
        again = sequence_attention(q, k, v, wire, layout)
        assert torch.equal(out, again), "a recomputed forward must be the same"
        grads = torch.autograd.grad(out, (q, k, v), grad.detach())
        spent = comm.meter.snapshot().sent_bytes - before
        results[str(layout)] = own, [out.detach(), *grads], spent
    return results


def dossier_bytes(comm: Communicator, rank: int) -> dict[str, Any]:
    """4 ranks, 256 tokens, 2 sequences, hidden 64, fp32; q says token * 1000 + head."""
    heads = 4
    positions = torch.arange(rank * 64, rank * 64 + 64, dtype=torch.float32)
    probe = positions.view(1, 1, -1, 1) * 1000 + torch.arange(float(heads)).view(1, -1, 1, 1)
    q = probe.expand(2, heads, 64, 16).contiguous()
    exchange = HeadExchange(SequenceWire(comm), range(4), heads, heads)
    before = comm.meter.snapshot()
    shares = exchange.shares(heads)
    whole = exchange.heads_here(exchange.to_heads(q, shares, is_backward=False), shares, 2, 64)
    back = exchange.tokens_here(exchange.to_tokens(whole, shares, is_backward=False), shares, 2, 64)
    spent = (comm.meter.snapshot() - before).sent_bytes
    before = comm.meter.snapshot()
    q.requires_grad_()
    out = ulysses_attention(q, q, q, comm)
    forward = (comm.meter.snapshot() - before).sent_by("sequence")
    out.sum().backward()
    backward = (comm.meter.snapshot() - before).sent_by("sequence_gradients")
    # As many tokens a rank, in a sequence of two ranks.
    before, first = comm.meter.snapshot(), rank - rank % 2
    ulysses_attention(q.detach(), q.detach(), q.detach(), comm, members=[first, first + 1])
    pair = (comm.meter.snapshot() - before).sent_by("sequence")
    # Without sequences, heads of keys on one rank or on two.
    for kv_heads in (4, 2):
        none = [torch.zeros(0, num, 2, 4, requires_grad=True) for num in (4, kv_heads, kv_heads)]
        ulysses_attention(none[0], none[1], none[2], comm).sum().backward()
        assert all(each.grad is not None and each.grad.shape == each.shape for each in none)
    return {"whole": whole, "is_back": torch.equal(back, q), "bytes": spent, "layer": (forward, backward), "pair": pair}


@pytest.fixture(scope="module")
def shared() -> list[dict[str, Any]]:
    return run_workers(share, RANKS)


@pytest.mark.parametrize("kind", ["cases", *VALUES])
def test_outputs_and_gradients_are_those_of_one_process(kind: str, shared: list[dict[str, Any]]) -> None:
    values = VALUES.get(kind, WIDTH)
    for number, (layout, heads, kv_heads, is_causal) in enumerate(CASES if kind == "cases" else UNLIKE):
        truth = alone(heads, kv_heads, is_causal, values=values)
        shape = Shape(heads, kv_heads, WIDTH, BATCH * LENGTH, itemsize=8, value_size=values)
        told = sent(layout, shape)
        for rank, found in enumerate(shared):
            _, own, results, spent = found[kind][number]
            for name, result, expected in zip(("out", "dq", "dk", "dv"), results, truth, strict=True):
                error = float((result - expected[:, :, own]).abs().max())
                assert error < 1e-12, (str(layout), heads, name, error)
            assert spent == sum(n for (source, _), n in told.items() if source == rank), (str(layout), heads)


def test_heads_over_two_and_four_ranks_are_exact_in_fp32(shared: list[dict[str, Any]]) -> None:
    errors = [error for found in shared for error in found["fp32"]]
    assert len(errors) == 4 * 16 and max(errors) < 1e-5


def test_a_ring_in_bf16_is_as_near_as_one_process_in_bf16(shared: list[dict[str, Any]]) -> None:
    for found in shared:
        told = found["bf16"]
        for error, whole, plain in zip(told["wire"], told["dtype"], told["plain"], strict=True):
            assert 1e-4 < error < 1.5 * plain and whole < 1.5 * plain, told


def test_documents_attend_only_to_themselves(shared: list[dict[str, Any]]) -> None:
    for number, (layout, heads, kv_heads, is_causal) in enumerate(PACKED):
        truth = alone(heads, kv_heads, is_causal, is_packed=True)
        told = sent(layout, Shape(heads, kv_heads, WIDTH, BATCH * LENGTH, itemsize=8))
        for rank, found in enumerate(shared):
            _, own, results, spent = found["packed"][number]
            for name, result, expected in zip(("out", "dq", "dk", "dv"), results, truth, strict=True):
                error = float((result - expected[:, :, own]).abs().max())
                assert error < 1e-12, (str(layout), heads, name, error)
            most = sum(n for (source, _), n in told.items() if source == rank)
            assert spent <= most if layout.ring > 1 else spent == most, (str(layout), heads)
    # Keys and values go only where a query of their document follows, and only their gradients return.
    owner = torch.cat([torch.full((LENGTH // RANKS,), rank) for rank in range(RANKS)])
    places = torch.cat([tokens_of(SequenceLayout(1, RANKS), rank, LENGTH) for rank in range(RANKS)])
    meeting = same_document().any(0).tril()[places][:, places].nonzero()
    pairs = {(int(owner[a]), int(owner[b])) for a, b in meeting if owner[a] != owner[b]}
    packet = 2 * 2 * BATCH * LENGTH // RANKS * WIDTH * 8
    assert 0 < len(pairs) < RANKS * (RANKS - 1)
    assert sum(found["packed"][0][3] for found in shared) == 3 * packet * len(pairs)


def test_heads_arrive_whole_and_go_back_bit_for_bit(shared: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(shared):
        told = found["bytes"]
        assert told["is_back"]
        expected = torch.arange(256.0) * 1000 + rank
        assert torch.equal(told["whole"], expected.view(1, 1, -1, 1).expand(2, 1, 256, 16))
        assert told["bytes"] == 2 * 24_576
        assert told["layer"] == (4 * 24_576, 4 * 24_576)
        # 1/2 of a rank's numbers leave it, not 3/4.
        assert told["pair"] == 4 * 16_384


def test_codecs_send_less_and_stay_close(shared: list[dict[str, Any]]) -> None:
    truth = alone(4, 4, True)
    codec = Codec.parse("int8/64")
    for rank, found in enumerate(shared):
        for method, (own, results, spent) in found["lossy"].items():
            for result, expected in zip(results, truth, strict=True):
                error = (result - expected[:, :, own]).norm() / expected[:, :, own].norm()
                assert 1e-4 < error < 0.03, (method, float(error))
            layout = SequenceLayout.parse(method, RANKS)
            shape = Shape(4, 4, WIDTH, BATCH * LENGTH)
            once = sum(n for (source, _), n in sent(layout, shape, codec, codec).items() if source == rank)
            assert once < spent < 2 * once


@pytest.mark.parametrize("tile", [1024, 7])
def test_blocks_by_plain_products_are_those_of_the_kernel(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "TILE", tile)
    q, k, v, grad = inputs(4, 2)
    for is_causal in (False, True):
        out, sums = blocks.forward(q, k, v, is_causal, 0.3)
        kernel = blocks.backward(grad, q, k, v, out, sums, is_causal, 0.3)
        torch.testing.assert_close(blocks.plain_forward(q, k, v, is_causal, 0.3), (out, sums), rtol=0, atol=1e-12)
        plain = blocks.plain_backward(grad, q, k, v, out, sums, is_causal, 0.3)
        torch.testing.assert_close(plain, kernel, rtol=0, atol=1e-12)


def test_fewer_heads_than_ranks_name_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"4 heads on 8 ranks.*nearest that works: method 'ring' or 'ulysses=4,ring=2'"
    ):
        HeadExchange(SequenceWire(_Eight()), range(8), 4, 4)  # type: ignore[arg-type]


def test_key_heads_that_serve_unequally_many_are_refused() -> None:
    message = "6 key heads for 8 query heads: each must serve equally many; nearest: 4 key heads"
    with pytest.raises(ConfigError, match=message):
        HeadExchange(SequenceWire(_Eight()), range(8), 8, 6)  # type: ignore[arg-type]
    q, k = torch.zeros(1, 8, 2, 4), torch.zeros(1, 6, 2, 4)
    with pytest.raises(ConfigError, match=message):
        ring_attention(q, k, k, SequenceWire(_Eight()))  # type: ignore[arg-type]


class _Eight:
    """As much of a communicator as is read before anything is sent."""

    rank, world_size = 0, 8


def test_the_reference_is_torchs_own() -> None:
    q, k, v, _ = inputs(4, 4)
    torch.testing.assert_close(alone(4, 4, True)[0], F.scaled_dot_product_attention(q, k, v, is_causal=True))
