"""Micro-batches that need each other: parts of a graph and of a sequence, in stages and in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.workers import run_workers
from thinwire.collectives import Mailbox, Topology
from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.hosts.pipeline import Runner
from thinwire.methods.pipeline import Carried, Costs, check, plan, recompute, simulate, there_and_back

STAGES, LAYERS, WIDTH, VERTICES = 4, 8, 6, 24


class Part(NamedTuple):
    """Some vertices, or tokens, in a row: the number of the part, where it begins and ends, and all parts' borders."""

    number: int
    parts: tuple[tuple[int, int], ...]

    @property
    def own(self) -> slice:
        return slice(*self.parts[self.number])


def parts_of(num: int) -> list[Part]:
    size = VERTICES // num
    borders = tuple((at * size, (at + 1) * size) for at in range(num))
    return [Part(number, borders) for number in range(num)]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def graph_of(kind: str, num_parts: int) -> Tensor:
    """Weights of edges [vertices, vertices]; apart: none between parts; causal: none to later parts."""
    edges = drawn(VERTICES, VERTICES, seed=1).abs() * (drawn(VERTICES, VERTICES, seed=2) > 0.5) / VERTICES
    part = torch.arange(VERTICES) // (VERTICES // num_parts)
    if kind == "apart":
        edges = edges * (part[:, None] == part)
    if kind == "causal":
        edges = edges * (part[:, None] >= part)
    return edges


class Convolutions(nn.Module):
    """Some layers h + tanh((A h) W) of a graph's network; the first stage has the features, the last the loss."""

    def __init__(self, graph: Tensor, layers: Sequence[int], carried: Carried) -> None:
        super().__init__()
        self.graph, self.carried, self.layers = graph, carried, layers
        self.weights = nn.ParameterDict({str(at): 0.5 * drawn(WIDTH, WIDTH, seed=10 + at) for at in layers})

    def gathered(self, name: str, part: Part, hidden: Tensor) -> Tensor:
        """The sum over all neighbours of a part's vertices."""
        total = self.graph[part.own, part.own] @ self.carried.leave(name, part.number, hidden)
        for other, borders in enumerate(part.parts):
            if other != part.number and (there := self.carried.of(name, other, part.number)) is not None:
                total = total + self.graph[part.own, slice(*borders)] @ there
        return total

    def forward(self, hidden: Tensor | None, part: Part) -> Tensor:
        hidden = drawn(VERTICES, WIDTH, seed=3)[part.own] if hidden is None else hidden
        for at in self.layers:
            hidden = hidden + torch.tanh(self.gathered(str(at), part, hidden) @ self.weights[str(at)])
        if LAYERS - 1 not in self.layers:
            return hidden
        return F.cross_entropy(hidden, torch.arange(VERTICES)[part.own] % WIDTH)


class Attention(Convolutions):
    """The same, where a token sees those before it: keys and values of earlier parts are carried."""

    def gathered(self, name: str, part: Part, hidden: Tensor) -> Tensor:
        own = self.carried.leave(name, part.number, torch.cat([hidden, hidden.tanh()], dim=1))
        earlier = (self.carried.of(name, other, part.number) for other in range(part.number))
        keys, values = torch.cat([*(each for each in earlier if each is not None), own]).chunk(2, dim=1)
        place = torch.arange(VERTICES)
        mask = place[part.own][:, None] >= place[: part.own.stop]
        return F.scaled_dot_product_attention(hidden[None], keys[None], values[None], mask[None])[0]


# Kind of the model, and parts; the last is computed twice.
ROWS: dict[str, tuple[str, int]] = {
    "whole": ("all", 1), "apart": ("apart", 4), "causal": ("causal", 4), "tokens": ("", 4), "again": ("causal", 4),
}  # fmt: skip


def model_of(kind: str, num_parts: int, layers: Sequence[int], carried: Carried) -> Convolutions:
    cls = Convolutions if kind else Attention
    return cls(graph_of(kind, num_parts), layers, carried)


def shape(chunk: int, part: Part) -> tuple[int, int]:
    return VERTICES // len(part.parts), WIDTH


def in_stages(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, num) in ROWS.items():
        carried, each = Carried(), LAYERS // STAGES
        stage = model_of(kind, num, range(rank * each, (rank + 1) * each), carried)
        parts, order = parts_of(num), list(range(num))
        mailbox = Mailbox(None, Topology(world_size, 1))
        made = there_and_back(STAGES, order)
        made = recompute(made, "always") if name == "again" else made
        runner = Runner(made, {rank: stage}, mailbox, shape, dtype=torch.float64)
        carried.begin(order)
        before = mailbox.meter.snapshot().sent_bytes
        loss = runner.run(parts).item()
        sent = mailbox.meter.snapshot().sent_bytes - before
        mailbox.close()
        # No gradient is left over.
        carried.begin(order)
        found[name] = loss, {at: weight.grad for at, weight in stage.weights.items()}, sent
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_workers(in_stages, STAGES)


@pytest.mark.parametrize("name", ROWS)
def test_gradients_are_those_of_one_process_that_sees_all(name: str, ranks: list[dict[str, Any]]) -> None:
    kind, num = ROWS[name]
    carried = Carried()
    carried.begin([0])
    whole = model_of(kind, num, range(LAYERS), carried)
    loss = whole(None, parts_of(1)[0])
    loss.backward()
    assert sum(rank[name][0] for rank in ranks) == pytest.approx(loss.item(), abs=1e-12)
    found = {at: gradient for rank in ranks for at, gradient in rank[name][1].items()}
    assert found.keys() == whole.weights.keys()
    for at, weight in whole.weights.items():
        assert (found[at] - weight.grad).abs().max() <= 1e-12, at
    # Borders alone, whatever the layers: forward and back, over 3 of them.
    assert sum(rank[name][2] for rank in ranks) == 2 * 3 * VERTICES * WIDTH * 8


def test_earlier_ones_give_this_round_s_values_and_later_ones_the_last_round_s() -> None:
    carried = Carried()
    for round_, order in enumerate([(0, 1), (1, 0)]):
        carried.begin(order)
        for number in order:
            carried.leave("h", number, torch.tensor([10.0 * round_ + number], requires_grad=True))
            other = carried.of("h", 1 - number, number)
            if number == order[0]:
                assert (None if other is None else other.tolist()) == (None if round_ == 0 else [1.0 - number])
            else:
                assert other is not None and other.tolist() == [10.0 * round_ + order[0]] and other.requires_grad
    carried.begin([0, 1])
    last = carried.of("h", 1, 0)
    assert last is not None and float(last) == 11 and not last.requires_grad


@torch.no_grad()
def test_with_weights_that_stay_the_values_become_exact_after_as_many_rounds_as_layers() -> None:
    parts, carried, alone = parts_of(4), Carried(), Carried()
    model = model_of("all", 4, range(LAYERS), carried)
    alone.begin([0])
    exact = model_of("all", 4, range(LAYERS), alone)(None, parts_of(1)[0])
    errors = []
    for round_ in range(LAYERS + 1):
        order = [(number + round_) % 4 for number in range(4)]
        carried.begin(order)
        errors.append(abs(float(sum(model(None, parts[number]) for number in order) / 4 - exact)))
    assert errors[0] > 1e-3 and errors[-1] <= 1e-14


def test_backwards_in_another_order_lose_no_gradient_unnoticed() -> None:
    carried = Carried()
    model = model_of("causal", 2, range(LAYERS), carried)
    carried.begin([0, 1])
    for loss in [model(None, part) for part in parts_of(2)]:
        loss.backward()
    with pytest.raises(ConfigError, match=r"what micro-batches \[0\] left came too late.*nearest: there_and_back"):
        carried.begin([0, 1])


def test_the_plan_takes_as_long_as_gpipe() -> None:
    made = there_and_back(4, [3, *range(3), *range(4, 16)])
    check(made)
    timeline = simulate(made, Costs.even(4), Network.even(4))
    assert timeline.makespan_s == simulate(plan("gpipe", 4, 16), Costs.even(4)).makespan_s == 3 * (16 + 4 - 1)
