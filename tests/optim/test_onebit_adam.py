"""AdamW with a variance that can be frozen: the floor, the state, what is refused. Its numbers: test_onebit_adam.py of
data_parallel."""

from __future__ import annotations

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.optim import OneBitAdamW


def frozen(floor: float) -> tuple[torch.Tensor, OneBitAdamW]:
    """Three elements, with a large, a tiny and no gradient, after which the variance is frozen."""
    x = torch.zeros(3)
    optimizer = OneBitAdamW([x], lr=1.0, weight_decay=0.0, floor=floor)
    x.grad = torch.tensor([1.0, 1e-4, 0.0])
    optimizer.freeze_after_step([x])
    assert not optimizer.is_frozen(x)
    optimizer.step()
    assert optimizer.is_frozen(x)
    return x, optimizer


def test_a_small_variance_is_raised_to_the_floor_and_none_is_left() -> None:
    x, optimizer = frozen(floor=0.25)
    # Their mean is (1 + 1e-8) / 2.
    torch.testing.assert_close(optimizer.state[x]["exp_avg_sq"], torch.tensor([1.0, 0.125, 0.0]))
    x, optimizer = frozen(floor=0.0)
    torch.testing.assert_close(optimizer.state[x]["exp_avg_sq"], torch.tensor([1.0, 1e-8, 0.0]))


def test_a_frozen_state_loads_as_frozen_and_goes_on_bit_for_bit() -> None:
    x, optimizer = frozen(floor=0.01)
    y = x.clone()
    second = OneBitAdamW([y], lr=1.0)
    second.load_state_dict(optimizer.state_dict())
    assert second.is_frozen(y)
    for step in range(3):
        x.grad = torch.tensor([0.1, 0.2, 0.0]) * step
        y.grad = x.grad.clone()
        optimizer.step()
        second.step()
    assert torch.equal(x, y)
    assert torch.equal(optimizer.state[x]["exp_avg"], torch.tensor([0.2, 0.4, 0.0]))


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": 0.0}, {"weight_decay": -0.1}, {"floor": 2.0}]
)
def test_refused_options_say_why(options: dict) -> None:
    with pytest.raises(ConfigError, match=r"onebit-adam \w+ .*: must be"):
        OneBitAdamW([torch.zeros(1)], **options)
