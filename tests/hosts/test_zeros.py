"""A weight whose gradient is exactly zero on every rank stays where it is: rows that no token reaches, and a mask."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire
from tests.workers import run_workers
from thinwire.codecs import Identity, Sign
from thinwire.collectives import Topology
from thinwire.compose import apply
from thinwire.layout.formats import describe_formats
from thinwire.layout.zeros import WEIGHTS, describe_zeros
from thinwire.methods.interface import Method

WIDTHS, GRIDS = (48, 72, 100), ((2, 1), (2, 2), (4, 2))
NUM_TOKENS, NUM_USED, STEPS = 60, 25, 6
METHODS: dict[str, Method] = {
    "zero-bf16": thinwire.ZeroBF16(),
    "sdp4bit": thinwire.SDP4Bit(),
    "sdp4bit-zstd": thinwire.SDP4Bit(inter_gradients="int4/64:bf16+hadamard32+zstd"),
    "sdp4bit-other-groups": thinwire.SDP4Bit(
        intra_gradients="int8/32:bf16:nearest+hadamard32", inter_gradients="int4/128:bf16:nearest+hadamard32"
    ),
    "frontier": thinwire.Frontier(),
    "zeropp": thinwire.ZeroPP(intra_gradients="int4/128+hadamard32", inter_gradients="int4/128+hadamard32", loco=True),
}


class Masked(nn.Linear):
    """Some weights take no part."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.rand(width, width) < 0.8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


class Net(nn.Module):
    """An embedding of which only some rows are used, and a matrix under a mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(NUM_TOKENS, width, padding_idx=3)
        self.layers = nn.ModuleList([Masked(width)])
        self.head = nn.Linear(width, 7)

    @property
    def masked(self) -> Masked:
        layer = self.layers[0]
        assert isinstance(layer, Masked)
        return layer

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.masked(self.embed(tokens)))).square().mean()


def moved(rank: int, world_size: int, local_size: int) -> dict[str, dict[str, tuple[int, float]]]:
    """By method, width and matrix: how many weights moved that had no gradient, and the share that did of others."""
    found = {}
    # A Latin square: every method has every width and every grid once, and every width every grid.
    turn = GRIDS.index((world_size, local_size))
    for number, (name, method) in enumerate(METHODS.items()):
        for width in WIDTHS[(number + turn) % len(WIDTHS) :][:1]:
            model = Net(width)
            mask = model.masked.mask.clone()
            before = {key: p.detach().clone() for key, p in model.named_parameters()}
            adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
            wrapped, optimizer = apply(
                method, model, adam, local_size=local_size, seed=0, timeout_s=300, checked=True, overlap=False
            )
            drawn = torch.Generator().manual_seed(rank)
            for _ in range(STEPS):
                wrapped(torch.randint(0, NUM_USED, (4, 8), generator=drawn)).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            after = optimizer.masters(list(before))
            change = {key: after[key].view_as(before[key]) != before[key] for key in before}
            still = {"embed.weight": torch.ones(NUM_TOKENS, width, dtype=torch.bool)}
            still["embed.weight"][:NUM_USED] = False
            still["embed.weight"][3] = True
            still["layers.0.weight"] = ~mask
            found[f"{name} {width}"] = {
                key: (int(change[key][rows].sum()), float(change[key][~rows].float().mean()))
                for key, rows in still.items()
            }
            optimizer.close()
    return found


@pytest.mark.parametrize(("world_size", "local_size"), GRIDS)
def test_what_has_no_gradient_stays(world_size: int, local_size: int) -> None:
    for found in run_workers(moved, world_size, local_size):
        for name, told in found.items():
            for key, (moved_still, moved_others) in told.items():
                assert moved_still == 0 and moved_others > 0.9, (name, key, told)


def test_the_start_says_which_codec_moves_them() -> None:
    grid = Topology(2, 1)
    assert not [row for row in describe_formats(thinwire.SDP4Bit(), grid) if row[0] == WEIGHTS]
    assert describe_zeros([Identity(), Sign(64), Sign(64)]) == [
        (WEIGHTS, "change, unless 64 neighbours have none", "sign/64 has no code for zero")
    ]
