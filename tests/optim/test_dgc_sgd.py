"""SGD whose gradients bring their momentum: with decay it is torch's momentum SGD."""

from __future__ import annotations

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.optim import DGCSGD


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_momentum_in_the_gradient_it_is_momentum_sgd(nesterov: bool) -> None:
    torch.manual_seed(0)
    x, buffer = torch.randn(6, 3), torch.zeros(6, 3)
    y = x.clone()
    ours = DGCSGD([x], lr=0.1, nesterov=nesterov, weight_decay=0.2)
    plain = torch.optim.SGD([y], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.2)
    for step in range(10):
        if step == 5:
            saved = ours.state_dict()
            ours = DGCSGD([x], lr=0.1)
            ours.load_state_dict(saved)
        grad = torch.randn(6, 3)
        buffer = 0.9 * buffer + grad
        x.grad, y.grad = grad + 0.9 * buffer if nesterov else buffer, grad
        ours.step()
        plain.step()
    torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -0.1}])
def test_refused_options_say_why(options: dict) -> None:
    with pytest.raises(ConfigError, match=r"dgc-sgd \w+ .*: must be"):
        DGCSGD([torch.zeros(1)], **options)
