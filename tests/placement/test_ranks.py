"""What a placed model promises beside training, on real processes."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import thinwire
from tests.placement.models import WIDTH, Ignoring, Spare
from tests.placement.test_runner import machine
from tests.workers import Rows, run_rows
from thinwire.placement import Placement
from thinwire.placement.trace import trace

STEPS = 3


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return kind().double()


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def placed(model: nn.Module, num_ranks: int, method: str, **told: Any) -> Placement:
    names = (node.name for node in trace(model, (batch(0),), told.get("leaves", ())).nodes)
    return thinwire.place(
        model, batch(0), machine(num_ranks), method, seconds=dict.fromkeys(names, (1e-3, 1e-3)), **told
    )


def arrays(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy().copy() for name, tensor in tensors.items() if name != "idle"}


def trained(model: nn.Module, apply: Callable[[torch.optim.Optimizer], Any] | None = None) -> dict[str, Any]:
    """Weights after some steps, and by step those without a gradient. The second step alone uses all outputs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    own = None if apply is None else apply(optimizer)
    told: dict[str, Any] = {"none": []}
    for step in range(STEPS):
        outputs = model(batch(step))[: 2 if step == 1 else 1]
        sum(output.square().mean() for output in outputs).backward()
        none = (name for name, param in model.named_parameters() if param.grad is None and name != "idle")
        told["none"].append(sorted(none))
        optimizer.step()
        optimizer.zero_grad()
    if own is not None:
        told["homes"] = own.routes.plan.homes
        own.close()
    return told | {"state": arrays(model.state_dict())}


class Dropping(nn.Module):
    """Two towers with dropout, and one more in a function."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.left(x), F.dropout(self.right(x), 0.2, self.training)
        return left + right, left


def _row(rank: int, num_ranks: int, row: str) -> dict[str, Any]:
    name, *rest = row.split()
    if name == "forward":
        return _forward(num_ranks)
    if name == "dropout":
        torch.manual_seed(5)
        placement = placed(made(Dropping).eval(), num_ranks, "m-topo")
    else:
        groups = [["head", "spare.0"], ["fed", "spare.2"]] if name == "groups" else []
        placement = placed(made(Spare), num_ranks, rest[0], leaves=[Ignoring], groups=groups)
    model = placement.traced.model.train()
    told = trained(model, lambda own: placement.apply(own, announce=False, checked="checked" in rest))
    return told | {"by_name": placement.homes}


def _forward(num_ranks: int) -> dict[str, Any]:
    """Outputs and bytes of a placement without a backward."""
    placement = placed(made(Spare), num_ranks, "m-topo", leaves=[Ignoring], training=False)
    own = placement.apply(None, announce=False)
    weights = sorted(own.model.state_dict())
    # With gradients enabled too, as a user may call it.
    outputs = [own.model(batch(step)) for step in range(2)]
    told = {name: each.calls for (name, _), each in own.meter.snapshot().operations.items()}
    own.close()
    return {"outputs": [[each.numpy() for each in one] for one in outputs], "weights": weights, "calls": told,
            "leaves": [each.grad_fn is None for one in outputs for each in one]}  # fmt: skip


ROWS = ["unused m-topo", "unused m-topo checked", "groups m-topo", "groups m-etf", "groups m-sct", "forward", "dropout"]


@functools.cache
def ranks_of(num_ranks: int) -> Rows:
    return run_rows(_row, ROWS, num_ranks, local_size=1)


def check_weights(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    state = {name: value for rank in ranks for name, value in rank["state"].items()}
    assert state.keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        assert abs(state[name] - value).max() <= 1e-12, name


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_weights_that_no_loss_reaches_have_no_gradient(num_ranks: int) -> None:
    expected = trained(made(Spare))
    assert [len(none) for none in expected["none"]] == [6, 2, 6]
    # In the groups of m-sct a gradient that is missing has to cross ranks.
    for row in [*ROWS[:2], *["groups m-sct"] * (num_ranks > 1)]:
        ranks = ranks_of(num_ranks).of(row)
        assert len(set(ranks[0]["homes"])) >= min(num_ranks, 2), row
        for step, none in enumerate(expected["none"]):
            assert sorted(name for rank in ranks for name in rank["none"][step]) == none, row
        check_weights(ranks, expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("method", ["m-topo", "m-etf", "m-sct"])
def test_stated_groups_share_a_rank(num_ranks: int, method: str) -> None:
    ranks = ranks_of(num_ranks).of(f"groups {method}")
    homes = ranks[0]["by_name"]
    assert homes["head"] == homes["spare_0"] and homes["fed"] == homes["spare_2"] and len(set(homes.values())) > 1
    held = [{name.rpartition(".")[0] for name in rank["state"]} for rank in ranks]
    assert all(("head" in own) == ("spare.0" in own) and ("fed" in own) == ("spare.2" in own) for own in held)
    check_weights(ranks, trained(made(Spare)))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_placement_without_training_runs_on_ranks(num_ranks: int) -> None:
    model, ranks = made(Spare), ranks_of(num_ranks).of("forward")
    for rank in ranks:
        for step, outputs in enumerate(rank["outputs"]):
            for found, value in zip(outputs, model(batch(step)), strict=True):
                assert abs(found - value.detach().numpy()).max() <= 1e-12
        assert all(rank["leaves"]) and rank["calls"]["placement_forward"] > 0
        assert not any(name.endswith("backward") for name in rank["calls"])
    # Each weight is on one rank, and none has an idle one, which only optimizers need.
    assert sorted(name for rank in ranks for name in rank["weights"]) == sorted(model.state_dict())
    assert sum(bool(rank["weights"]) for rank in ranks) > 1


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dropout_draws_the_same_on_any_number_of_ranks(num_ranks: int) -> None:
    (alone,), ranks = ranks_of(1).of("dropout"), ranks_of(num_ranks).of("dropout")
    assert len(set(ranks[0]["homes"])) > 1
    check_weights(ranks, alone)


def test_dropout_follows_torchs_generator() -> None:
    model, plain = made(Dropping), made(Dropping)
    ones = torch.ones(4, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for each in model.modules():
            if isinstance(each, nn.Linear):
                each.weight.copy_(torch.eye(WIDTH))
                each.bias.zero_()
    own = placed(model, 1, "m-etf").apply(torch.optim.SGD(model.parameters()))
    torch.manual_seed(3)
    (first, left), (second, _) = model(ones), model(ones)
    # Each forward and each node has draws of its own.
    assert not torch.equal(first, second) and set((first - left).unique().tolist()) == {0.0, 2.5}
    assert not torch.equal(first - left > 0, left > 0)
    torch.manual_seed(3)
    assert torch.equal(model(ones)[0], first)
    # A node's draws are not those of the loop.
    after = torch.rand(3)
    torch.manual_seed(3)
    torch.randint(2**62, ())
    assert torch.equal(torch.rand(3), after)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(ones)[0], plain.eval()(ones)[0])
    own.close()


def _seeded(rank: int, num_ranks: int, row: str) -> str:
    torch.manual_seed(rank if row == "unlike" else 0)
    placement = placed(made(Dropping), num_ranks, "m-topo" if row == "alike" or not rank else "m-etf")
    with contextlib.redirect_stderr(io.StringIO()) as told:
        placement.apply(torch.optim.SGD(placement.traced.model.parameters())).close()
    return told.getvalue()


def test_the_table_says_whose_random_numbers_are_drawn() -> None:
    told = run_rows(_seeded, ["alike", "unlike"], 2, local_size=1)
    (alike, _), (unlike, silent) = told.of("alike"), told.of("unlike")
    assert "the same on any number of ranks" in alike and not silent
    assert "that of the first rank" in unlike and "that of the first rank" not in alike
    assert "each rank's own" in unlike and "call torch.manual_seed with one number on all ranks" in unlike
