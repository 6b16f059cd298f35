"""Moments that another optimizer takes over: its bias correction gives back what the first one stepped with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.checkpoint import Snapshot
from thinwire.errors import ConfigError
from thinwire.optim import LANS, Apollo, OneBitAdamW
from thinwire.state.portable import Held, StateDict, add_optimizer, restore_optimizer, state_dict_of

STEPS, FROZEN_STEPS = 5, 3


def gradient(step: int) -> Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(step))


def onebit(is_frozen: bool) -> tuple[Tensor, torch.optim.Optimizer]:
    """After some steps; their variance is frozen for the last of them, or not."""
    param = torch.linspace(-1.0, 1.0, 6)
    optimizer = OneBitAdamW([param], lr=0.01, floor=0.0)
    for step in range(STEPS + FROZEN_STEPS):
        if is_frozen and step == STEPS - 1:
            optimizer.freeze_after_step([param])
        param.grad = gradient(step)
        optimizer.step()
    return param, optimizer


def adamw(betas: tuple[float, float]) -> tuple[Tensor, torch.optim.Optimizer]:
    param = torch.linspace(-1.0, 1.0, 6)
    optimizer = torch.optim.AdamW([param], lr=0.01, betas=betas)
    for step in range(STEPS + FROZEN_STEPS):
        param.grad = gradient(step)
        optimizer.step()
    return param, optimizer


def moved(param: Tensor, optimizer: torch.optim.Optimizer, into: torch.optim.Optimizer) -> None:
    """The state of one optimizer into another, as a checkpoint brings it."""
    (target,) = into.param_groups[0]["params"]
    snapshot = add_optimizer(Snapshot({}, common={}), optimizer, {"x": Held(param, 6, is_copy=True)})
    source = StateDict(state_dict_of(snapshot, optimizer.param_groups))
    restore_optimizer(source, into, {"x": Held(target, 6, is_copy=True)})
    assert torch.equal(target, param)


def corrected(optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    """Both moments as a step has them."""
    (state,) = optimizer.state.values()
    step, (beta1, beta2) = float(state["step"]), optimizer.param_groups[0]["betas"]
    square = state["exp_avg_sq"].double() / (1.0 if state.get("frozen") else 1 - beta2**step)
    return state["exp_avg"].double() / (1 - beta1**step), square


NEW: dict[str, Any] = {
    "adamw as onebit": lambda x: torch.optim.AdamW([x], lr=0.01),
    "adamw of other betas": lambda x: torch.optim.AdamW([x], lr=0.01, betas=(0.8, 0.95)),
    "lans": lambda x: LANS([x], lr=0.01),
    "onebit": lambda x: OneBitAdamW([x], lr=0.01, floor=0.0),
}
OLD = {
    "frozen": lambda: onebit(is_frozen=True), "not frozen": lambda: onebit(is_frozen=False),
    "adamw": lambda: adamw((0.9, 0.95)),
}  # fmt: skip


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("old", OLD)
def test_a_step_has_the_moments_that_it_would_have_had(old: str, new: str) -> None:
    param, optimizer = OLD[old]()
    into = NEW[new](torch.zeros(6))
    moved(param, optimizer, into)
    for mine, true in zip(corrected(into), corrected(optimizer), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-6, atol=0)


def test_adamw_steps_from_a_frozen_variance_as_from_the_true_moments(caplog: pytest.LogCaptureFixture) -> None:
    param, optimizer = onebit(is_frozen=True)
    first, square = corrected(optimizer)
    into = NEW["adamw as onebit"](torch.zeros(6))
    moved(param, optimizer, into)
    assert "optimizer: exp_avg_sq: transformed" in caplog.text
    (target,), number = into.param_groups[0]["params"], STEPS + FROZEN_STEPS + 1
    target.grad = gradient(100)
    m = 0.9 * first * (1 - 0.9 ** (number - 1)) + 0.1 * target.grad
    v = 0.999 * square * (1 - 0.999 ** (number - 1)) + 0.001 * target.grad.square()
    update = m / (1 - 0.9**number) / ((v / (1 - 0.999**number)).sqrt() + 1e-8)
    into.step()
    torch.testing.assert_close(target.double(), param * (1 - 1e-4) - 0.01 * update, rtol=1e-6, atol=0)


def test_the_same_betas_change_no_bit(caplog: pytest.LogCaptureFixture) -> None:
    for param, optimizer, new in ((*onebit(is_frozen=True), "onebit"), (*adamw((0.9, 0.999)), "adamw as onebit")):
        into = NEW[new](torch.zeros(6))
        moved(param, optimizer, into)
        (state,), (before,) = into.state.values(), optimizer.state.values()
        assert torch.equal(state["exp_avg_sq"], before["exp_avg_sq"]) and state.get("frozen") == before.get("frozen")
    assert "transformed" not in caplog.text


def apollo(rows: int, columns: int, **options: Any) -> tuple[Tensor, torch.optim.Optimizer]:
    """After some steps on one matrix."""
    param = torch.linspace(-1.0, 1.0, rows * columns).view(rows, columns)
    optimizer = Apollo([("layer.weight", param)], lr=0.01, matrices="weight", **options)
    for _ in range(STEPS):
        param.grad = torch.ones(rows, columns)
        optimizer.step()
    return param, optimizer


def test_moments_of_columns_are_not_taken_for_those_of_rows() -> None:
    for old, new in (("larger", "rows"), ("rows", "larger")):
        param, optimizer = apollo(16, 32, channels=old)
        snapshot = add_optimizer(Snapshot({}, common={}), optimizer, {"x": Held(param, param.numel(), is_copy=True)})
        source = StateDict(state_dict_of(snapshot, optimizer.param_groups))
        target, into = apollo(16, 32, channels=new)
        told = (
            f"apollo channels '{new}': the checkpoint has moments of 'layer.weight' by channels '{old}'; nearest: {old}"
        )
        with pytest.raises(ConfigError, match=told):
            restore_optimizer(source, into, {"x": Held(target, target.numel(), is_copy=True)})


def test_other_options_of_apollo_that_moments_do_not_depend_on_may_change() -> None:
    # In a square matrix channels are rows anyway.
    cases: dict[tuple[int, int], dict[str, Any]] = {
        (16, 32): {"scale": 4.0, "period": 3, "limit": None}, (16, 16): {"channels": "rows"}
    }  # fmt: skip
    for shape, options in cases.items():
        param, optimizer = apollo(*shape)
        target, into = apollo(*shape, **options)
        snapshot = add_optimizer(Snapshot({}, common={}), optimizer, {"x": Held(param, param.numel(), is_copy=True)})
        source = StateDict(state_dict_of(snapshot, optimizer.param_groups))
        restore_optimizer(source, into, {"x": Held(target, target.numel(), is_copy=True)})
        assert torch.equal(into.state[target]["exp_avg_projected"], optimizer.state[param]["exp_avg_projected"])
