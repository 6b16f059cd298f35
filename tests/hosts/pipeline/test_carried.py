"""Micro-batches that need each other: parts of a graph and of a sequence, in stages and in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.workers import run_workers
from thinwire.collectives import Expected, Label, Mailbox, Topology
from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.hosts.pipeline import Runner
from thinwire.methods.pipeline import Carried, Costs, check, least_cut, plan, recompute, simulate, there_and_back

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
    return found | {"shared": in_layers(rank, world_size)}


@torch.no_grad()
def in_layers(rank: int, world_size: int) -> tuple[float, int]:
    """This rank's part of the loss, and the bytes it sends, where each rank has a part of the graph in every layer."""
    graph, part = graph_of("all", world_size), parts_of(world_size)[rank]
    # For each rank, of whose vertices it needs the values.
    needs = [(graph[each.own] != 0).any(0) for each in parts_of(world_size)]
    weights = model_of("all", world_size, range(LAYERS), Carried()).weights
    whole = drawn(VERTICES, WIDTH, seed=3)
    mailbox = Mailbox(None, Topology(world_size, 1))
    others = [each for each in parts_of(world_size) if each.number != rank]
    for at in range(LAYERS):
        rows = {each.number: torch.arange(VERTICES)[each.own][needs[rank][each.own]] for each in others}
        mailbox.begin([Expected(Label("forward", at, n), n, 8 * WIDTH * len(own)) for n, own in rows.items()])
        for each in others:
            own = whole[part.own][needs[each.number][part.own]]
            mailbox.send(each.number, Label("forward", at, rank), own.contiguous().view(-1).view(torch.uint8))
        # What was not sent is not known.
        known = torch.full_like(whole, float("nan"))
        known[part.own] = whole[part.own]
        for number, own in rows.items():
            known[own] = mailbox.take(Label("forward", at, number)).view(torch.float64).view(-1, WIDTH)
        mailbox.finish()
        of_own = graph[part.own][:, needs[rank]] @ known[needs[rank]]
        known[part.own] += torch.tanh(of_own @ weights[str(at)])
        whole = known
    sent = mailbox.meter.snapshot().sent_bytes
    mailbox.close()
    targets = torch.arange(VERTICES)[part.own] % WIDTH
    return F.cross_entropy(whole[part.own], targets).item() / world_size, sent


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


def exact_inputs() -> list[Tensor]:
    """What each layer of the whole graph is given, and what the last returns."""
    graph, carried = graph_of("all", 4), Carried()
    weights = model_of("all", 4, range(LAYERS), carried).weights
    found = [drawn(VERTICES, WIDTH, seed=3)]
    for at in range(LAYERS):
        found.append(found[-1] + torch.tanh(graph @ found[-1] @ weights[str(at)]))
    return found


@torch.no_grad()
def test_with_weights_that_stay_one_more_layer_is_exact_after_each_round() -> None:
    parts, carried, exact = parts_of(4), Carried(), exact_inputs()
    model = model_of("all", 4, range(LAYERS), carried)
    whole = F.cross_entropy(exact[-1], torch.arange(VERTICES) % WIDTH)
    for num_rounds in range(1, LAYERS + 2):
        order = [(number + num_rounds) % 4 for number in range(4)]
        carried.begin(order)
        loss = sum(model(None, parts[number]) for number in order) / 4
        for at in range(LAYERS):
            errors = []
            for number in range(4):
                other = (number + 1) % 4
                carried.begin([other, number])
                kept = carried.of(str(at), number, other)
                assert kept is not None
                errors.append(float((kept - exact[at][parts[number].own]).abs().max()))
            # Others are near, the later the nearer.
            assert max(errors) <= 1e-14 if num_rounds > at else max(errors) > 1e-14, (num_rounds, at)
        # A round's loss is of the values of the round before.
        assert num_rounds <= LAYERS or abs(float(loss - whole)) <= 1e-14


def test_stages_send_less_than_ranks_that_share_each_layer(ranks: list[dict[str, Any]]) -> None:
    graph, parts = graph_of("all", 4), parts_of(4)
    inside = torch.arange(VERTICES) // (VERTICES // 4)
    needed = sum(int(((graph[part.own] != 0).any(0) & (inside != part.number)).sum()) for part in parts)
    copies = 1 + needed / VERTICES
    of_layers = 2 * sum(rank["shared"][1] for rank in ranks)
    of_stages = sum(rank["whole"][2] for rank in ranks)
    whole = F.cross_entropy(exact_inputs()[-1], torch.arange(VERTICES) % WIDTH)
    assert sum(rank["shared"][0] for rank in ranks) == pytest.approx(whole.item(), abs=1e-12)
    assert copies > 2 and of_layers / of_stages >= LAYERS * (copies - 1) / (STAGES - 1) - 1e-12


def test_parts_of_a_graph_are_even_and_few_edges_lie_between_them() -> None:
    # Four groups whose vertices all know each other, in a ring, in no order.
    group = torch.arange(24) % 4
    edges = (group[:, None] == group).double()
    edges[0, 1] = edges[1, 0] = edges[2, 3] = edges[3, 2] = 1.0
    shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    parts = least_cut(edges[shuffled][:, shuffled], 4)
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    assert all(len(part) == 6 and len(group[shuffled][part].unique()) == 1 for part in parts)
    assert sorted(map(len, least_cut(edges, 5))) == [4, 5, 5, 5, 5]


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
