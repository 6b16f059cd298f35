"""The gradient of an embedding travels by its rows: the same bits in fewer bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.workers import run_workers
from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.hosts.fsdp.describe import _tables
from thinwire.methods.interface import MethodPlan
from thinwire.methods.tables import RowsMethod, by_tokens, tables_in

VOCABULARY, TOKENS, STEPS = 1500, 40, 3
METHODS: dict[str, tuple[type[RowsMethod], dict[str, Any]]] = {
    "zero": (thinwire.Zero, {}),
    "zero-bf16": (thinwire.ZeroBF16, {}),
    "sdp4bit": (thinwire.SDP4Bit, {}),
    "sdp4bit-loco": (thinwire.SDP4Bit, {"loco": True}),
    "sdp4bit-topk": (thinwire.SDP4Bit, {"inter_gradients": "topk10%/64", "intra_gradients": "int8/64"}),
}


class Lookup(nn.Module):
    """An embedding of its own, and one that is tied to the head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.words, self.tied = nn.Embedding(VOCABULARY, width), nn.Embedding(60, width)
        self.last, self.head = nn.Linear(width, width), nn.Linear(width, 60, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.tied(tokens % 60)
        return self.head(torch.tanh(self.last(self.first(x)))).square().mean()


def trained(rank: int, method: RowsMethod, width: int, local_size: int) -> tuple[list[Tensor], dict[str, Any]]:
    """The weights after some steps, in one of which rank 0 has one token alone; bytes of a step, and the promise."""
    model = Lookup(width)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped, optimizer = thinwire.zero(model, adamw, method, local_size=local_size, checked=True, announce=False)
    for step in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(10 * step + rank))
        before = optimizer.meter.snapshot()
        wrapped(tokens if step != 1 or rank else tokens[:1].expand(TOKENS)).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = optimizer.meter.snapshot() - before
    told = {"sent": sent.sent_bytes, "most": optimizer.bytes_per_step, "rows": optimizer.describe()}
    optimizer.synchronize()
    weights = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return weights, told


def compared(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for local_size in (1, 2, 4):
        for number, (name, (kind, options)) in enumerate(METHODS.items()):
            # Inside one node alone, codecs of the hop between nodes do nothing.
            if local_size == 4 and name not in ("zero", "sdp4bit"):
                continue
            width = (64, 48)[(number + local_size // 2) % 2]
            on, off = (trained(rank, kind(**options, embedding_rows=way), width, local_size) for way in ("on", "off"))
            same = all(torch.equal(one, other) for one, other in zip(on[0], off[0], strict=True))
            found[f"{name} {local_size}"] = same, on[1], off[1]
    return found


def test_the_same_bits_in_fewer_bytes() -> None:
    """Four ranks, as nodes of one, two and four ranks."""
    for told in run_workers(compared, 4):
        for name, (same, on, off) in told.items():
            assert same, name
            assert on["sent"] < 0.75 * off["sent"] or ("topk" in name and on["sent"] <= off["sent"]), (name, on, off)
            assert on["sent"] <= on["most"] and off["sent"] == off["most"]
            row = next(row for row in on["rows"] if row[0] == "embedding_rows on")
            assert row[1] == "rows of zeros don't travel in the gradient of words.weight"
            assert ("embedding_rows off", "gradients of embeddings travel whole", "as asked") in off["rows"]


def test_auto_takes_embeddings_that_fill_a_bucket() -> None:
    model, small = (nn.Sequential(nn.Embedding(num, 32), nn.Linear(32, 4)) for num in (20_000, 1000))
    method, grid = thinwire.SDP4Bit(), Topology(4, 1)
    assert method.embedding_rows == "auto"

    def units(model: nn.Module) -> Any:
        return method.units(model, dict(model.named_parameters()), [method.levels(grid)], lambda _: 0, None)

    (layout,) = tables_in(units(model))
    assert layout.names == ["0.weight"] and str(layout.wire.inter).endswith("+rows64")
    assert not list(tables_in(units(small)))
    row = method.describe(method.levels(grid), units(small))[-1]
    assert row[:2] == ("embedding_rows auto", "no effect") and "524,288 elements" in row[2]
    topk = thinwire.SDP4Bit(intra_gradients="topk10%/64", inter_gradients="topk10%/64", embedding_rows="on")
    assert topk.describe(method.levels(grid), units(small))[-1][2] == "blocks of topk10%/64 share bytes in a packet"
    # A codec that was stated makes no embedding of a matrix.
    stated = thinwire.SDP4Bit(inter_gradients="int4/64:bf16+rows64")
    (unit,) = stated.units(small, {"1.weight": torch.empty(4, 32)}, [method.levels(grid)], lambda _: 0, None)
    assert unit.layouts[0].wire.has_rows and not list(tables_in([unit]))
    under_fsdp = [_tables(SimpleNamespace(method=thinwire.SDP4Bit(embedding_rows=way))) for way in ("on", "auto")]
    assert under_fsdp == [[("embedding_rows on", "no effect", "FSDP2's buffers have one length")], []]
    with pytest.raises(ConfigError, match="embedding_rows"):
        thinwire.SDP4Bit(embedding_rows="yes")  # type: ignore[arg-type]


def test_a_plan_counts_the_rows_of_its_tokens() -> None:
    """A plan without the number of tokens promises the most; with it, what that many distinct rows take."""
    model, grid = nn.Sequential(nn.Embedding(50_000, 64), nn.Linear(64, 4)), Topology(2, 2)
    whole = thinwire.SDP4Bit(embedding_rows="off").plan(model, grid, 1)
    method = thinwire.SDP4Bit()
    most = method.plan(model, grid, 1)

    def gradients(plan: MethodPlan) -> float:
        return sum(num for (operation, _), num in plan.sent.items() if operation == "gradients")

    assert gradients(whole) < gradients(most) < 1.01 * gradients(whole)
    few, (row,) = by_tokens(most, method, model, grid, 500)
    assert gradients(few) < 0.02 * gradients(whole)
    assert row[0] == "embedding_rows of 0.weight" and row[2] == "at most 500 of its 50,000 rows"
    all_of_them, _ = by_tokens(most, method, model, grid, 10**6)
    assert gradients(all_of_them) == gradients(most)
    assert by_tokens(whole, thinwire.SDP4Bit(embedding_rows="off"), model, grid, 500) == (whole, [])
