"""Models traced, measured and placed, without processes; and what can't be."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import thinwire
from tests.placement import models
from tests.placement.test_runner import machine, seconds
from thinwire.cost import Message
from thinwire.errors import ConfigError
from thinwire.placement.plan import FORWARD, DevicePlan
from thinwire.placement.profile import profile
from thinwire.placement.runner import identity
from thinwire.placement.trace import trace
from thinwire.report.units import bytes_text

WIDTH = models.WIDTH


class Router(nn.Module):
    """Follows values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Routed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.part = nn.Sequential(inner, nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.first(x)).mean()


class Own(nn.Module):
    """One forward that is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.way = forward

    def forward(self, x: Tensor) -> Any:
        return self.way(self, x)


X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def test_a_plan_is_simulated_as_it_was_made_and_travels_as_numbers() -> None:
    model, inputs = models.made("branched"), models.batch("branched", 0)
    stated = seconds(model, inputs)
    placement = thinwire.place(model, inputs, machine(2), "m-etf", seconds=stated)
    assert placement.alone_s == pytest.approx(sum(map(sum, stated.values())))
    assert placement.homes.keys() < stated.keys() and set(placement.homes.values()) == {0, 1}
    # The outputs go to all ranks, which the schedule leaves out.
    assert placement.schedule.makespan_s <= placement.step_s < placement.schedule.makespan_s + 1e-3
    assert placement.step_s < placement.alone_s
    for rank in range(2):
        sent = placement.timeline.graph.sent(rank)
        assert sum(sent.values()) == placement.routes.sent_bytes(rank) > 0
        assert {operation for operation, _ in sent} == {"placement_forward", "placement_backward"}
    names = list(placement.homes)
    assert DevicePlan.decoded(placement.plan.encoded(names), names) == placement.plan
    assert "units on 2 of 2 ranks" in placement.describe()[0][1]
    # The loss and the logits lie on the rank that has no part in them too.
    other = thinwire.place(model, inputs, machine(2), "m-topo", seconds=stated)
    peak, less = other.schedule.peak_bytes()
    assert other.homes["cross_entropy"] == other.homes["mul_4"] == 1 and peak > less
    told = {name: text for name, text, _ in other.describe()}
    assert told["memory of a rank"] == f"at most {bytes_text(peak + 8 * (1 + 6 * 5))}" != f"at most {bytes_text(peak)}"
    again = thinwire.place(model, inputs, machine(2), "m-etf", seconds=stated)
    assert again.plan == placement.plan


def test_a_tied_weight_has_one_rank_and_slow_links_leave_all_on_one() -> None:
    model, inputs = models.made("transformer"), models.batch("transformer", 0)
    for method in ("m-topo", "m-etf", "m-sct"):
        homes = thinwire.place(model, inputs, machine(3), method, seconds=seconds(model, inputs)).homes
        assert homes["embedding"] == homes["embedding_weight"] and len(set(homes.values())) > 1
    slow = thinwire.place(model, inputs, machine(3, rate=10.0), seconds=seconds(model, inputs))
    assert set(slow.homes.values()) == {0} and slow.schedule.makespan_s == pytest.approx(slow.alone_s)
    assert ("spread over ranks", "no", "messages would take longer than they save") in slow.describe()


def test_memory_cuts_the_model_and_too_little_names_the_floor() -> None:
    model, inputs = models.made("transformer"), models.batch("transformer", 0)
    stated = seconds(model, inputs)

    def placed(memory_bytes: float, num_ranks: int = 2) -> thinwire.Placement:
        return thinwire.place(model, inputs, machine(num_ranks, memory_bytes, rate=10.0), "m-etf", seconds=stated)

    whole = max(placed(1e9, 1).schedule.peak_bytes())
    half = placed(0.8 * whole)
    assert set(half.homes.values()) == {0, 1} and max(half.schedule.peak_bytes()) <= 0.87 * 0.8 * whole
    # The reserve alone makes the whole too large.
    assert set(placed(1.05 * whole).homes.values()) == {0, 1}
    with pytest.raises(ConfigError) as told:
        placed(0.1 * whole)
    found = re.search(
        r"nearest: ([\d.]+) kB each, with which it does; no method can with less than ([\d.]+) kB", str(told.value)
    )
    assert "less 13%" in str(told.value) and found is not None
    least, bound = (1e3 * float(number) for number in found.groups())
    assert bound <= least and placed(1.01 * least).plan
    with pytest.raises(ConfigError):
        placed(0.99 * bound)
    with pytest.raises(ConfigError, match=r"and 20 kB of the process"):
        own = replace(machine(2, whole), base_bytes=2e4)
        thinwire.place(model, inputs, own, "m-etf", seconds=stated)


def test_what_is_measured_is_kept_out_of_the_model() -> None:
    model, inputs = models.made("branched", torch.float32), models.batch("branched", 0, torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    traced = trace(model, inputs)
    found = profile(traced, inputs, {}, num_rounds=2)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and all(param.grad is None for param in model.parameters())
    assert found.seconds.keys() == found.sizes.keys() and min(min(pair) for pair in found.seconds.values()) >= 0
    assert all(found.seconds[name][1] > 0 for name, size in found.sizes.items() if size.needs_grad)
    # Shapes are no operations; a view holds nothing of its own, a matrix of 6 x 5 does.
    assert not {"getattr_1", "getitem_6"} & found.sizes.keys() and found.sizes["view"].new_bytes == 0
    assert found.sizes["head"].new_bytes == 6 * 5 * 4 and found.sizes["head"].shape == (6, 5)
    assert not found.sizes["blocks_0_scale"].new_bytes and found.sizes["blocks_0_scale"].needs_grad


def is_training(module: nn.Module) -> bool:
    return module.training


class Switched(nn.Module):
    """Does more in training, which it finds out in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)
        self.way = way

    def helped(self) -> bool:
        return self.training

    @property
    def trains(self) -> bool:
        return self.training

    def asked(self) -> bool:
        return {
            "itself": lambda: self.training,
            "a helper": self.helped,
            "a property": lambda: self.trains,
            "a function": lambda: is_training(self),
            "getattr": lambda: getattr(self, "train" + "ing"),
            "a comprehension": lambda: all(each.training for each in [self]),
            "a part": lambda: self.weight.training,
        }[self.way]()

    def forward(self, x: Tensor) -> Tensor:
        return self.weight(x) + x if self.asked() else self.weight(x)


class Derived(Switched):
    """Reads its mode in the forward of its base class alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


WAYS = ["itself", "a helper", "a property", "a function", "getattr", "a comprehension", "a part"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Switched, Derived])
@pytest.mark.parametrize("mode", [True, False])
def test_a_forward_that_is_another_one_by_mode_is_for_the_mode_it_was_placed_in(
    kind: type[Switched], way: str, mode: bool
) -> None:
    model, x = nn.Sequential(kind(way)).train(mode), X.detach()
    expected = model(x)
    one = thinwire.place(model, x, machine(1), "m-etf").apply(torch.optim.SGD(model.parameters()), announce=False)
    assert torch.equal(model(x), expected)
    model.train(not mode)
    now, then = ("training", "evaluation")[mode], ("evaluation", "training")[mode]
    name = "0.weight" if way == "a part" else "0"
    with pytest.raises(ConfigError, match=rf"module '{name}' is in {now}, was in {then} .* leaves=\['{name}'\], or"):
        model(x)
    model.train(mode)
    assert torch.equal(model(x), expected)
    one.close()


class Constants(nn.Module):
    """What depends on the mode are only constants of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardtanh(self.norm(x), -0.5 if self.training else -1.0)
        return F.leaky_relu(self.layer(x), 0.5 if self.training else 0.1) * x.shape[0]


def test_constants_that_depend_on_the_mode_change_with_it() -> None:
    model, plain = Constants(), Constants()
    plain.load_state_dict(model.state_dict())
    one = thinwire.place(model, X, machine(1), "m-etf").apply(torch.optim.SGD(model.parameters()), announce=False)
    for mode in (False, True, False):
        for each in (model, plain):
            each.train(mode)
        assert torch.equal(model(X), plain(X)), mode
    one.close()
    # A number that is kept from placing may not depend on it.
    shaped = Own(lambda self, x: self.layer(x) * x.shape[0 if self.training else 1])
    one = thinwire.place(shaped, X, machine(1), "m-etf").apply(torch.optim.SGD(shaped.parameters()), announce=False)
    with pytest.raises(ConfigError, match="the Own is in evaluation"):
        shaped.eval()(X)
    one.close()


def test_modules_change_their_mode_by_themselves() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    traced = trace(model, (X,))
    assert not traced.reads and traced.now() is traced
    model.eval()
    assert traced.now() is traced


def test_gradients_pass_complex_tensors() -> None:
    model, inputs = models.made("spectral"), models.batch("spectral", 0)
    weight = model.get_parameter("first.weight")
    expected = torch.autograd.grad(model(*inputs)["loss"], weight)[0]
    one = thinwire.place(model, inputs, machine(1), "m-etf", seconds=seconds(model, inputs))
    own = one.apply(torch.optim.SGD(model.parameters()), announce=False)
    model(*inputs)["loss"].backward()
    assert weight.grad is not None and torch.allclose(weight.grad, expected, atol=1e-12)
    own.close()


def test_inference_keeps_no_activations() -> None:
    model, inputs = models.made("branched"), models.batch("branched", 0)
    stated = seconds(model, inputs)
    training, alone = (
        thinwire.place(model, inputs, machine(2), "m-etf", seconds=stated, training=training)
        for training in (True, False)
    )
    assert sum(alone.schedule.peak_bytes()) < 0.5 * sum(training.schedule.peak_bytes())
    assert all(task.does.kind == FORWARD for task in alone.timeline.graph.tasks if not isinstance(task.does, Message))
    with pytest.raises(ConfigError, match="was given no optimizer, and the placement was made with training=True"):
        training.apply(None)
    with pytest.raises(ConfigError, match="a group of 1 ranks for a placement on 2; nearest: a machine of 1"):
        training.apply(torch.optim.SGD(model.parameters()))


def test_a_single_rank_runs_the_model_as_it_was() -> None:
    model, inputs = models.made("branched"), models.batch("branched", 0)
    expected = model.eval()(*inputs)
    one = thinwire.place(model, inputs, machine(1), training=False, seconds=seconds(model, inputs)).apply(None)
    assert all(torch.equal(value, expected[key]) for key, value in model(*inputs).items())
    with pytest.raises(ConfigError, match=r"x=a tensor \[3, 8\] of torch.float64: .* for a tensor \[6, 8\] of"):
        model(inputs[0][:3], inputs[1][:3])
    with pytest.raises(ConfigError, match=r"factor=3.0: the placement was made for factor=2.0"):
        model(*inputs, factor=3.0)
    one.close()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, x: self.layer(x).add_(1.0), "'add_' writes into its input.*such as x = x \\+ y"),
        (lambda self, x: torch.relu_(self.layer(x)), "'relu_' writes into its input"),
        (lambda self, x: (lambda y: torch.add(y, 1.0, out=y))(self.layer(x)), "'add' writes into its input"),
        (lambda self, x: self.layer(x) * x.sum().item(), "'item' makes a tensor of 'sum_1' into a number"),
        (lambda self, x: self.layer(x) if x.mean() > 0 else x, "can't trace Own.forward: .* module of its own"),
        (lambda self, x: self.recurrent(x), "returns all that 'recurrent' gives, several tensors"),
        (lambda self, x: (lambda y: y + F.relu(y, inplace=True) + y)(self.layer(x)), "'relu' writes into its input"),
    ],
)  # fmt: skip
def test_forwards_that_can_not_be_planned(forward: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        thinwire.place(Own(forward), X, machine(2), "m-etf")


def test_a_module_that_can_not_be_traced_is_named_and_may_be_a_leaf() -> None:
    for leaf in ("part.0", Router):
        placement = thinwire.place(Routed(Router()), X, machine(2), "m-etf", leaves=[leaf])
        assert "part_0" in placement.homes
    with pytest.raises(ConfigError) as told:
        thinwire.place(Routed(Router()), X, machine(2))
    assert "can't trace module 'part.0' (Router): symbolically traced variables" in str(told.value)
    assert "leaves=['part.0'], or leaves=[Router]" in str(told.value)
    with pytest.raises(ConfigError, match=r"leaf 'prat.0' is no module of Routed; did you mean 'part.0'\?"):
        thinwire.place(Routed(Router()), X, machine(2), leaves=["prat.0"])
    with pytest.raises(ConfigError, match=r"leaves 'part.0' must be a list, such as \['part.0'\]"):
        thinwire.place(Routed(Router()), X, machine(2), leaves="part.0")


def test_ranks_agree_on_functions_by_name() -> None:
    def told(function: Any) -> str:
        model = Own(lambda self, x: self.part(self.layer(x)).mean())
        model.part = function
        placement = thinwire.place(model, X, machine(1))
        return identity(placement.routes, list(placement.homes))

    for function in (F.relu, lambda y: torch.cat([y, y]), lambda y: torch.mul(y, y), F.silu, lambda y: y @ y.t()):
        # An address differs from process to process.
        assert " at 0x" not in told(function)
    assert told(F.relu) == told(F.relu) != told(F.silu)
    # Constants of functions and of modules count.
    assert told(lambda y: F.leaky_relu(y, 0.1)) != told(lambda y: F.leaky_relu(y, 0.2))
    assert told(nn.Dropout(0.1)) == told(nn.Dropout(0.1)) != told(nn.Dropout(0.2))


def test_several_tensors_of_a_node_stay_with_those_that_take_them() -> None:
    model = Own(lambda self, x: torch.cat(self.recurrent(self.layer(x))[0].chunk(2, -1), -1).mean())
    placement = thinwire.place(model, X[None], machine(2), "m-etf")
    unit = next(unit for unit in placement.plan.units if "chunk" in unit)
    assert "cat" in unit and "recurrent" not in unit


def test_what_would_be_lost_in_silence_is_refused() -> None:
    model, (x, targets) = models.made("branched"), models.batch("branched", 0)
    head = nn.Linear(2, 2)
    frozen = model.get_parameter("norm.weight").requires_grad_(False)
    placement = thinwire.place(model, (x, targets), machine(1), "m-etf", seconds=seconds(model, (x, targets)))
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()])
    own = placement.apply(optimizer, announce=False)
    # What is not the model's stays in the optimizer.
    assert {id(each) for each in head.parameters()} < {id(each) for each in optimizer.param_groups[0]["params"]}
    with pytest.raises(ConfigError, match="'x' requires a gradient, and none comes back"):
        model(x.clone().requires_grad_(), targets)
    loss = model(x, targets)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through one forward"):
        loss.backward()
    frozen.requires_grad_()
    with pytest.raises(ConfigError, match="weight' requires a gradient, and did not when the model was placed"):
        model(x, targets)
    own.close()
    # A loss of one number, whose divisor is the batch that the model was placed for.
    mean = Own(lambda self, x: self.layer(x).sum() / x.shape[0])
    own = thinwire.place(mean, X, machine(1), "m-etf").apply(torch.optim.SGD(mean.parameters()), announce=False)
    with pytest.raises(ConfigError, match=r"x=a tensor \[2, 8\] of torch.float32: .* for a tensor \[4, 8\]"):
        mean(X[:2])
    own.close()
    with pytest.raises(ConfigError, match="'x' is a list with tensors: give each an argument of its own"):
        thinwire.place(Own(lambda self, x: self.layer(x[0])), {"x": [X]}, machine(1), "m-etf")


def test_bad_input_has_a_nearest_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = models.made("branched"), models.batch("branched", 0)
    stated = seconds(model, inputs)
    with pytest.raises(ConfigError, match=r"method 'm-stc': no way to place a model; did you mean 'm-sct'\?"):
        thinwire.place(model, inputs, machine(2), "m-stc")
    with pytest.raises(ConfigError, match=r"states -1: .* nearest: 0"):
        thinwire.place(model, inputs, machine(2), states=-1)
    with pytest.raises(ConfigError, match=r"inputs do not fit Branched\.forward"):
        thinwire.place(model, inputs[:1], machine(2))
    with pytest.raises(ConfigError, match="'x' requires a gradient"):
        thinwire.place(model, (inputs[0].clone().requires_grad_(), inputs[1]), machine(2))
    with pytest.raises(ConfigError, match=r"groups: 'haed' is no module or node .*; did you mean 'head'\?"):
        thinwire.place(model, inputs, machine(2), groups=[["haed", "norm"]])
    with pytest.raises(ConfigError, match=r"groups: 'head' must be a list of names .* such as \[\['head', \.\.\.\]\]"):
        thinwire.place(model, inputs, machine(2), groups=["head"])
    with pytest.raises(ConfigError, match="stated seconds lack the node 'head'"):
        thinwire.place(model, inputs, machine(2), seconds={k: v for k, v in stated.items() if k != "head"})
    with pytest.raises(ConfigError, match=r"stated seconds of 'haed': no node of the graph; did you mean 'head'\?"):
        thinwire.place(model, inputs, machine(2), seconds=stated | {"haed": (0.0, 0.0)})
    ours = builtins.__import__

    def without_scipy(name: str, *rest: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return ours(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(
        ConfigError, match=r"pip install -e '\.\[plan\]' in thinwire's folder; nearest without it: m-etf"
    ):
        thinwire.place(model, inputs, machine(2), seconds=stated)
