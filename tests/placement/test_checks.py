"""What `thinwire.place`, `apply` and a placed model refuse, and gradient hooks of weights."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.placement.test_runner import machine, seconds
from thinwire.errors import ConfigError

WIDTH = 8
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Product(nn.Module):
    """Two branches. If `uses_b` is false, the output does not depend on the second."""

    def __init__(self, uses_b: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.uses_b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), uses_b

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x) * self.b(x) if self.uses_b else self.a(x), self.b(x)


NAMES = {"a": (1e-3, 1e-3), "b": (1e-3, 1e-3), "b_1": (1e-3, 1e-3), "mul": (1e-3, 1e-3)}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"machine": "m4.json"}, "must be a thinwire.cost.Machine; nearest: thinwire.cost.Machine.read('m4.json')"),
        ({"machine": None}, "machine None: must be a thinwire.cost.Machine; nearest: thinwire.calibrate"),
        ({"machine": machine(2, math.nan)}, "memory_bytes nan of the machine: must be a number, at least 0; nearest:"),
        ({"machine": machine(2, -5)}, "memory_bytes -5 of the machine: must be"),
        ({"machine": replace(machine(2), base_bytes=-1.0)}, "base_bytes -1.0 of the machine: must be"),
        ({"method": None}, "method None: no way to place a model; choose one of m-etf"),
        ({"method": ["m-sct"]}, "method ['m-sct']: no way to place a model; did you mean 'm-sct'?"),
        ({"model": torch.relu}, "place got a builtin_function_or_method as its model: must be a torch.nn.Module"),
        ({"inputs": 3}, "inputs 3: must be a tensor, a list by position or a dict by name; nearest: (tensor, ...)"),
        ({"inputs": None}, "inputs None: must be a tensor"),
        ({"inputs": (X.numpy(),)}, "inputs: a ndarray must be a tensor; nearest: torch.as_tensor of it"),
        ({"inputs": X[:, :3]}, "node 'a' (module 'a') fails for tensors [4, 3] of torch.float32: mat1 and mat2"),
        ({"inputs": X.double()}, "node 'a' (module 'a') fails for tensors [4, 8] of torch.float64: mat1 and mat2"),
        ({"groups": [[1]]}, "groups [[1]]: must be a list of lists of names that share a rank; nearest: []"),
        ({"groups": None}, "groups None: must be a list of lists"),
        ({"leaves": [3]}, "leaves [3]: must be a list of modules' names or classes; nearest: []"),
        ({"leaves": None}, "leaves None: must be a list of modules' names"),
        ({"states": "2"}, "states '2': the tensors that an optimizer keeps of a weight, a whole number; nearest: 2"),
        ({"states": 1.5}, "states 1.5: the tensors"),
        ({"seconds": 3}, "seconds 3: must be (forward, backward) by the name of a node; nearest: None"),
        ({"seconds": {"a": 1e-3}}, "(forward, backward), each finite and at least 0; nearest: (0.001, 0.0)"),
        ({"seconds": NAMES | {"a": (math.nan, 1.0)}}, "seconds of 'a', (nan, 1.0): must be"),
        ({"seconds": NAMES | {"a": (math.inf, 1.0)}}, "seconds of 'a', (inf, 1.0): must be"),
        ({"seconds": NAMES | {"a": (-1.0, 1.0)}}, "each finite and at least 0; nearest: (0.0, 1.0)"),
    ],
    ids=lambda each: " ".join(each)[:20],
)  # fmt: skip
def test_arguments_that_can_not_work_have_a_rule_and_a_nearest(given: dict[str, Any], told: str) -> None:
    values: dict[str, Any] = {"model": Product(), "inputs": X, "machine": machine(2), "method": "m-etf"} | given
    with pytest.raises(ConfigError, match=re.escape(told)):
        thinwire.place(**values)


def test_a_compiled_model_is_refused() -> None:
    # Not a row of those above: a compiler is loaded for it, by each process that only collects tests.
    model: Any = torch.compile(Product())
    with pytest.raises(ConfigError, match="this OptimizedModule is compiled: must be a plain model"):
        thinwire.place(model, inputs=X, machine=machine(2), method="m-etf")


def test_numbers_of_numpy_are_seconds_and_inputs() -> None:
    stated: Any = {name: (np.float64(a), np.float32(b)) for name, (a, b) in NAMES.items()}
    assert thinwire.place(Product(), X, machine(2), "m-etf", seconds=stated).homes.keys() == NAMES.keys()


def test_a_model_is_applied_once_with_its_own_optimizer_and_until_it_is_closed() -> None:
    model = Product()
    placement = thinwire.place(model, X, machine(1), "m-etf", seconds=NAMES)
    with pytest.raises(ConfigError, match="no parameter of this SGD is one of the placed Product: must be over its"):
        placement.apply(torch.optim.SGD(Product().parameters()), announce=False)
    with pytest.raises(ConfigError, match=r"Placement\.apply got a list as its optimizer"):
        placement.apply([], announce=False)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters())
    own = placement.apply(optimizer, announce=False)
    with pytest.raises(ConfigError, match="this Product has been placed, and each rank has a part of it; nearest: the"):
        placement.apply(optimizer, announce=False)
    with pytest.raises(ConfigError, match="module '0' has been placed"):
        thinwire.place(nn.Sequential(model), X, machine(1), "m-etf")
    with pytest.raises(ConfigError, match="create_graph=True: gradients of a placed model have no graph"):
        torch.autograd.grad(model(X)[0].sum(), [model.a.weight], create_graph=True)
    own.close()
    with pytest.raises(ConfigError, match=r"the placed model is closed, .*; nearest: call it before `close`"):
        model(X)


@pytest.mark.parametrize("uses_b", [True, False])
def test_a_gradient_hook_is_called_once_and_never_for_none(uses_b: bool) -> None:
    def run(is_placed: bool) -> tuple[list[Tensor | None], int]:
        model, calls = Product(uses_b), list[Tensor]()

        def doubled(gradient: Tensor) -> Tensor:
            calls.append(gradient)
            return gradient * 2

        for weight in (model.a.weight, model.b.weight):
            weight.register_hook(doubled)
        if is_placed:
            placement = thinwire.place(model, X, machine(1), "m-etf")
            placement.apply(torch.optim.SGD(model.parameters()), announce=False)
        assert not calls
        for _ in range(2):
            model(X)[0].sum().backward()
        handle = model.a.weight.register_hook(lambda gradient: gradient * 5)
        model(X)[0].sum().backward()
        handle.remove()
        model(X)[0].sum().backward()
        return [model.a.weight.grad, model.b.weight.grad], len(calls)

    (ours, num), (plain, want) = run(True), run(False)
    assert num == want == 4 * (1 + uses_b)
    for a, b in zip(ours, plain, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.allclose(a, b, rtol=1e-6)


def test_the_table_says_why_all_lies_on_one_rank() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    stated = seconds(model, [X])

    def why(method: str, rate: float, groups: list[list[str]]) -> str:
        placement = thinwire.place(model, X, machine(2, rate=rate), method, seconds=stated, groups=groups)
        return next(why for name, _, why in placement.describe() if name == "spread over ranks")

    assert why("m-topo", 1e9, []).startswith("m-topo ignores seconds")
    assert why("m-etf", 10.0, [["0", "1"]]) == "all nodes share a rank"
    assert why("m-etf", 10.0, []) == "messages would take longer than they save"
