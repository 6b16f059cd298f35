"""What a forward does beside computing on traced tensors: kept in a placement, or refused."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import thinwire
from tests.placement.models import WIDTH
from tests.placement.test_ranks import arrays, batch, made
from tests.placement.test_runner import machine
from tests.workers import Rows, run_rows
from thinwire.errors import ConfigError
from thinwire.placement.trace import trace

STEPS = 2


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Distilled(nn.Module):
    """A student of three teachers without gradients, each in another way, scaled by a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.student = (tower() for _ in range(4))
        self.register_buffer("scale", torch.zeros(WIDTH))

    @torch.no_grad()
    def taught(self, x: Tensor) -> Tensor:
        return self.second(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            told = self.first(x) * 2
            with torch.enable_grad():
                mine = self.student(x)
        with torch.set_grad_enabled(False):
            told = told + self.taught(x) + self.third(x)
        return (mine * self.scale.exp() - told).square(), told


class Cast(nn.Module):
    """Towers in bfloat16, of which one has a layer without."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = tower(), tower(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            left = self.left(x)
            with torch.autocast("cpu", enabled=False):
                head = self.head(left.to(x.dtype))
            return head * self.right(x), left


KINDS: dict[str, Callable[[], nn.Module]] = {"distilled": Distilled, "cast": Cast}


def of_kind(name: str) -> nn.Module:
    return made(KINDS[name]) if name == "distilled" else made(KINDS[name]).float()


def trained(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """By step the outputs, and the gradients; the buffers grow between steps."""
    told: dict[str, Any] = {"steps": []}
    for step in range(STEPS):
        outputs = model(batch(step).to(dtype))
        sum(output.float().sum() if output.dtype == torch.bfloat16 else output.sum() for output in outputs).backward()
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        found = {f"output {number}": output.detach().double() for number, output in enumerate(outputs)}
        told["steps"].append(arrays(found | {name: grad.clone() for name, grad in grads.items()}))
        told["kinds"] = [(output.dtype, output.requires_grad) for output in outputs]
        model.zero_grad()
        with torch.no_grad():
            for buffer in model.buffers():
                buffer += 1.0
    return told


def _row(rank: int, num_ranks: int, name: str) -> dict[str, Any]:
    model = of_kind(name)
    dtype = next(model.parameters()).dtype
    stated = {node.name: (1e-3, 1e-3) for node in trace(model, (batch(0).to(dtype),)).nodes}
    placement = thinwire.place(model, batch(0).to(dtype), machine(num_ranks), "m-topo", seconds=stated)
    own = placement.apply(torch.optim.SGD(model.parameters()), announce=False)
    told = trained(model, dtype) | {"homes": own.routes.plan.homes}
    own.close()
    return told


@functools.cache
def rows(num_ranks: int) -> Rows:
    return run_rows(_row, list(KINDS), num_ranks, local_size=1)


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_contexts_and_buffers_count_at_each_call(name: str, num_ranks: int) -> None:
    model, ranks = of_kind(name), rows(num_ranks).of(name)
    expected = trained(model, next(model.parameters()).dtype)
    assert len(set(ranks[0]["homes"])) == num_ranks
    for rank in ranks:
        assert rank["kinds"] == expected["kinds"]
    for step, alone in enumerate(expected["steps"]):
        found = {key: value for rank in ranks for key, value in rank["steps"][step].items()}
        assert found.keys() == alone.keys() and len(alone) == (6 if name == "distilled" else 12)
        for key, value in alone.items():
            assert abs(found[key] - value).max() <= (1e-12 if name == "distilled" else 1e-6 * abs(value).max()), key


def test_autocast_around_a_call_is_that_of_the_placement() -> None:
    model = of_kind("cast")
    own = placed_alone(model, batch(0).float())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigError, match=r"autocast is on with torch.bfloat16 on cpu, and was off .* under the same"),
    ):
        model(batch(0).float())
    own.close()
    plain, model = of_kind("cast"), of_kind("cast")
    with torch.autocast("cpu", torch.bfloat16):
        own = placed_alone(model, batch(0).float())
        assert torch.equal(model(batch(0).float())[0], plain(batch(0).float())[0])
    own.close()


def placed_alone(model: nn.Module, x: Tensor, **told: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters())
    return thinwire.place(model, x, machine(1), "m-etf", **told).apply(optimizer, announce=False)


class Inner(nn.Module):
    """A layer with a buffer, and a forward that is given."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(WIDTH, WIDTH), forward
        self.number, self.kept = 0, list[Any]()
        self.own = torch.Generator()
        self.register_buffer("count", torch.zeros(()))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def _counted(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return self.layer(x) * self.count


def _numbered(self: Any, x: Tensor) -> Tensor:
    self.number += 1
    return self.layer(x) * self.number


def _new(self: Any, x: Tensor) -> Tensor:
    self.last = self.layer(x)
    return self.last


def _caught(self: Any, x: Tensor) -> Tensor:
    try:
        return self.layer(x) * torch.rand(())
    except ConfigError:
        return self.layer(x)


def _seeded(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return F.dropout(self.layer(x))


def _packed(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        return self.layer(x)


REFUSED: list[tuple[Callable[[Any, Tensor], Tensor], str]] = [
    (lambda self, x: self.layer(x) + torch.randn(WIDTH), "draws a random number"),
    (lambda self, x: self.layer(x) if torch.rand(()) < 0.5 else x, "draws a random number"),
    (lambda self, x: self.layer(x) + torch.rand(WIDTH, generator=self.own), "draws a random number"),
    (lambda self, x: self.layer(x) * random.random(), "draws a random number"),
    (lambda self, x: self.layer(x) * np.random.rand(), "draws a random number"),
    (_caught, "draws a random number"),
    (_seeded, "seeds a generator"),
    (_packed, "works under saved_tensors_hooks"),
    (lambda self, x: checkpoint(self.layer, x, use_reentrant=False), "works under saved_tensors_hooks"),
    (_counted, "changes its attribute 'count'"),
    (lambda self, x: self.layer(x) * self.count.add_(1), "'add_' writes into 'inner.count' in module 'inner'"),
    (lambda self, x: self.layer(x) * self._buffers["count"].add_(1), "reads or writes 'inner.count' other than"),
    (lambda self, x: self.layer(x) + sum(p.sum() for p in self.parameters()), "reads or writes 'inner.layer.weight'"),
    (_numbered, "changes its attribute 'number'"),
    (_new, "changes its attribute 'last'"),
    (lambda self, x: (self.kept.append(1), self.layer(x))[1], "changes its attribute 'kept'"),
]


class Outer(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Inner(forward)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x) + torch.arange(WIDTH))


X = batch(0).float()


def everything(model: nn.Module) -> Any:
    """All that a model holds, and the generators' states."""
    held = [(name, key, repr(value)) for name, own in model.named_modules() for key, value in vars(own).items()]
    state: Any = np.random.get_state()
    drawn = [each.get_state().tolist() for own in model.modules() for each in vars(own).values()
             if isinstance(each, torch.Generator)]  # fmt: skip
    return held, drawn, torch.get_rng_state().tolist(), random.getstate(), state[1].tolist(), state[2:]


@pytest.mark.parametrize(("forward", "message"), REFUSED)
def test_what_a_graph_would_leave_out_is_refused_by_name(forward: Any, message: str) -> None:
    model = Outer(forward)
    before = everything(model)
    with pytest.raises(ConfigError, match=message) as told:
        thinwire.place(model, X, machine(2), "m-etf")
    assert "leaves=[" in str(told.value) and "inner" in str(told.value)
    assert everything(model) == before
    # As a leaf it is one node, which does it at each call; and nothing of that is left by `place`.
    thinwire.place(model, X, machine(1), "m-etf", leaves=["inner"])
    assert everything(model) == before


def test_the_model_itself_is_told_to_move_it() -> None:
    with pytest.raises(ConfigError, match=r"Inner.forward draws .* into a module of its own, and name it in leaves"):
        thinwire.place(Inner(REFUSED[0][0]), X, machine(2), "m-etf")


def test_a_leaf_that_counts_and_draws_does_so_at_each_call() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x) * self.count + torch.rand(())

    model = Outer(forward)
    own = placed_alone(model, X, leaves=["inner"])
    first, second = model(X), model(X)
    assert model.inner.count == 2 and not torch.equal(first, second)
    own.close()


def test_a_second_trace_has_the_same_names() -> None:
    model = Outer(lambda self, x: self.layer(x) + torch.ones(WIDTH))
    before = everything(model)
    names = [node.name for node in trace(model, (X,)).nodes]
    assert "_tensor_constant0" in names and names == [node.name for node in trace(model, (X,)).nodes]
    assert everything(model) == before
    expected = model(X)
    own = placed_alone(model, X, seconds=dict.fromkeys(names, (1e-3, 1e-3)))
    assert torch.allclose(model(X), expected)
    own.close()


def test_an_input_is_a_tensor_to_a_forward_that_asks() -> None:
    """Of what it is given instead, the graph would have another branch."""

    def forward(self: Any, x: Tensor) -> Tensor:
        asked = isinstance(x, Tensor), torch.is_tensor(x), isinstance(x, (nn.Parameter, dict))
        return x * 2 if asked == (True, True, False) else self.layer(x)

    assert [node.name for node in trace(Inner(forward), (X,)).nodes] == ["mul"]


def test_shapes_of_weights_are_numbers() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        assert self.layer.weight.dtype == torch.float32 and self.count.ndim == self.count.dim() == 0
        assert isinstance(self.layer.weight, nn.Parameter) and isinstance(self.count, Tensor)
        assert not isinstance(self.count, nn.Parameter) and len([*self.layer.weight]) == len(self.layer.bias) == WIDTH
        return sum(self.layer(x) for _ in range(self.layer.weight.shape[0] // 4))

    names = [node.name for node in trace(Outer(forward), (X,)).nodes]
    assert {"inner_layer", "inner_layer_1"} <= set(names) and "inner_layer_2" not in names
