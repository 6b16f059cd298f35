"""LANS against the formulas written out, in double precision."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.optim import LANS, NAMED, OPTIMIZERS, make_optimizer

LR, BETA1, BETA2, EPS, DECAY = 0.05, 0.8, 0.9, 1e-6, 0.1


def norm(x: list[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in x))


def by_hand(x: list[float], gradients: list[list[float]]) -> list[float]:
    """Element by element, as the paper has it."""
    m, v = [0.0] * len(x), [0.0] * len(x)
    for t, raw in enumerate(gradients, 1):
        g = [value / (norm(raw) + EPS) for value in raw]
        m = [BETA1 * old + (1 - BETA1) * new for old, new in zip(m, g, strict=True)]
        v = [BETA2 * old + (1 - BETA2) * new * new for old, new in zip(v, g, strict=True)]
        root = [math.sqrt(value / (1 - BETA2**t)) + EPS for value in v]
        r = [mi / (1 - BETA1**t) / ri + DECAY * xi for mi, ri, xi in zip(m, root, x, strict=True)]
        c = [gi / ri + DECAY * xi for gi, ri, xi in zip(g, root, x, strict=True)]
        trust_r, trust_c = (norm(x) / norm(way) if norm(x) and norm(way) else 1.0 for way in (r, c))
        x = [xi - LR * (BETA1 * trust_r * ri + (1 - BETA1) * trust_c * ci) for xi, ri, ci in zip(x, r, c, strict=True)]
    return x


def drive(optimizer: torch.optim.Optimizer, params: list[Tensor], gradients: list[list[Tensor]]) -> None:
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient.clone()
        optimizer.step()


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("start", ["random", "zero", "zero gradient"])
def test_equals_the_formulas_written_out(start: str) -> None:
    torch.manual_seed(0)
    params = [some(3, 4), some(5)]
    gradients = [[some(3, 4) * 100, some(5) * 1e-3] for _ in range(7)]
    if start == "zero":
        params[0].zero_()
    if start == "zero gradient":
        params[0].zero_()
        gradients[0][0].zero_()
    expected = [
        by_hand(p.flatten().tolist(), [g[i].flatten().tolist() for g in gradients]) for i, p in enumerate(params)
    ]
    drive(LANS(params, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY), params, gradients)
    for param, values in zip(params, expected, strict=True):
        torch.testing.assert_close(param.flatten(), torch.tensor(values, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_the_scale_of_a_gradient_has_no_effect() -> None:
    torch.manual_seed(0)
    start, gradients = some(4, 4), [[some(4, 4)] for _ in range(4)]
    ways = []
    for scale in (1.0, 1e4):
        x = start.clone()
        drive(LANS([x]), [x], [[g * scale for g in step] for step in gradients])
        ways.append(x - start)
    torch.testing.assert_close(ways[0], ways[1], rtol=1e-5, atol=0)


def test_a_saved_state_goes_on_bit_for_bit() -> None:
    torch.manual_seed(0)
    x, gradients = torch.randn(6), [[torch.randn(6)] for _ in range(6)]
    first = LANS([x])
    drive(first, [x], gradients[:3])
    y = x.clone()
    second = LANS([y])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    drive(first, [x], gradients[3:])
    drive(second, [y], gradients[3:])
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, math.nan)}, {"eps": 0.0}, {"weight_decay": -0.1}]
)
def test_refused_options_say_why(options: dict) -> None:
    with pytest.raises(ConfigError, match=r"lans \w+ .*: must be"):
        LANS([torch.zeros(1)], **options)


def test_optimizers_by_name() -> None:
    x = torch.zeros(3, 4)
    for name in OPTIMIZERS:
        named: tuple[list[Any], dict[str, str]] = ([("x", x)], {"matrices": "x"})
        params, options = named if name in NAMED else ([x], {})
        assert make_optimizer(name, [{"params": params}], 0.1, **options).param_groups[0]["lr"] == 0.1
    with pytest.raises(ConfigError, match="unknown optimizer 'lens'; did you mean 'lans'"):
        make_optimizer("lens", [{"params": [x]}], 0.1)
