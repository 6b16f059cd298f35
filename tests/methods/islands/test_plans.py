"""What methods of islands keep stands in their plans, before anything runs."""

from __future__ import annotations

import torch
from torch import nn

import thinwire
from thinwire.collectives import Topology
from thinwire.islands.correction import Correction
from thinwire.methods.interface import Method
from thinwire.methods.outer.correction import ProximalCorrection

WIDTH = 16
NUM_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def kept(method: Method) -> dict[str, int]:
    return dict(method.plan(nn.Linear(WIDTH, WIDTH), Topology(4, 2), 1).other)


def test_a_plan_counts_all_that_the_outer_method_keeps() -> None:
    assert kept(thinwire.DiLoCo())["outer parameters and momentum"] == 2 * NUM_BYTES
    assert kept(thinwire.LocalSGD())["outer parameters"] == NUM_BYTES
    assert kept(thinwire.DiLoCo(codec="sign", error_decay=1.0))["error feedback of outer gradients"] >= NUM_BYTES
    row = "anchors and memory of the correction"
    corrected = kept(thinwire.DiLoCo(fedspeed=10.0))
    assert corrected["outer correction"] == NUM_BYTES and corrected[row] == 2 * NUM_BYTES
    # A sharded optimizer steps a half of the parameters on each rank of an island of two.
    assert kept(thinwire.DiLoCo(fedspeed=10.0, inner=thinwire.Zero()))[row] == NUM_BYTES


def test_a_correction_holds_the_bytes_that_the_plan_counts() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    correction = Correction(ProximalCorrection(10.0), torch.optim.SGD(model.parameters(), lr=0.1))
    held = [*correction.state.anchors.tensors.values(), *correction.state.h.tensors.values()]
    assert sum(tensor.nbytes for tensor in held) == sum(correction.state.kept_bytes().values()) == 2 * NUM_BYTES
    # What is saved is a copy, and comes back.
    saved = correction.state.state_dict()
    correction.state.h["0"].fill_(1.0)
    correction.load_state_dict(saved)
    assert not correction.state.h["0"].any()
