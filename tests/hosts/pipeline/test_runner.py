"""Plans that run: the gradients of one process, the bytes of the formula, and what happens when a peer dies."""

from __future__ import annotations

import itertools
import os
import random
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.hosts.pipeline import models
from tests.workers import Rows, run_rows, run_workers
from thinwire.collectives import Mailbox, Topology
from thinwire.errors import ConfigError, PeerLostError
from thinwire.hosts.pipeline import Runner
from thinwire.hosts.pipeline.visits import VisitState
from thinwire.methods.pipeline import Action, Costs, Plan, check, fitted, plan, recompute, simulate, skipping
from thinwire.methods.pipeline.plan import Routes

# "order ranks micro-batches chunks", and what else is done to the plan.
PLANS: dict[str, list[str]] = {
    "2": [
        "gpipe 1", "gpipe 3", "gpipe 3 except-last", "1f1b 1", "1f1b 5", "1f1b 4 always", "v-half 1", "v-half 3",
        "interleaved 4", "looped-bfs 3", "interleaved-zb 4", "zbv 4", "zbv 4 always", "dualpipe-v 4", "fitted 1",
        "fitted 5", "halves 5",
    ],
    "4": [
        "gpipe 1", "gpipe 4", "1f1b 4", "1f1b 3 always", "v-half 2", "interleaved 4", "interleaved-zb 4", "zbv 4",
        "dualpipe-v 8", "fitted 4", "halves 4", "skips 4", "skipping 6", "drawn 1", "drawn 2", "drawn 3", "without 4",
        "nodes 4", "starts 6",
    ],
}  # fmt: skip
# Plans in which two nodes have the same layers: the stage of each node.
NODES = {"nodes": (0, 1, 1, 2), "starts": (0, 0, 1, 2)}


def made(text: str, num_ranks: int) -> Plan:
    """The plan that a row is about."""
    order, number, *mode = text.split()
    num = int(number)
    if order in NODES:
        return skipping(3, num, 0.33, nodes=NODES[order])
    if order in ("fitted", "halves"):
        costs = Costs.even(num_ranks)
        return fitted(range(num_ranks), [range(num_ranks)] * num, costs, in_flight=3, halves=order == "halves")
    if order == "skips":
        # Skips and swaps, and back to rank 0 for the head.
        paths = [(0, 1, 3, 4), (0, 2, 1, 4), (0, 3, 2, 4), (0, 1, 2, 3, 4)]
        return fitted((0, 1, 2, 3, 0), paths, Costs.even(5))
    if order == "skipping":
        return skipping(num_ranks, num, 0.33)
    if order == "drawn":
        return drawn(num, num_ranks)
    if order == "without":
        # Nobody visits chunk 2.
        return fitted((0, 1, 2, 3, 0), [(0, 1, 3, 4), (0, 3, 1, 4)] * (num // 2), Costs.even(5))
    result = plan(order, num_ranks, num)
    return recompute(result, mode[0]) if mode else result


def layers_of(text: str, made_plan: Plan) -> list[int]:
    """Which layers each chunk has. Nodes of one stage have the same, and so have the heads behind all nodes."""
    nodes = NODES.get(text.split()[0])
    if nodes is None:
        return list(range(len(made_plan.home)))
    return [*nodes, *[max(nodes) + 1] * nodes.count(0)]


def nodes_alike(text: str) -> list[list[int]]:
    """The nodes of each stage that has several; starts have a head each besides."""
    stages = NODES.get(text.split()[0], ())
    of_stage = ([node for node, at in enumerate(stages) if at == stage] for stage in sorted(set(stages)))
    return [nodes for nodes in of_stage if len(nodes) > 1]


def drawn(seed: int, num_ranks: int) -> Plan:
    """Paths through any chunks in any order, and for each rank any order that does not wait for ever."""
    draws, head = random.Random(seed), num_ranks
    paths = [
        (0, *draws.sample(range(1, num_ranks), draws.randint(1, num_ranks - 1)), head)
        for _ in range(draws.randint(4, 8))
    ]
    home = (*range(num_ranks), 0)
    routes, done = Routes(paths, home), set[Any]()
    left = [Action(kind, chunk, number) for number, path in enumerate(paths) for chunk in path for kind in "FB"]
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    while left:
        action = draws.choice([each for each in left if all(need in done for need in routes.needs(each))])
        left.remove(action)
        done |= {action, *routes.gives(action)}
        orders[home[action.chunk]].append(action)
    return Plan(home, tuple(paths), tuple(map(tuple, orders)))


def sizes_of(made: Plan) -> list[int]:
    return [2 + number % 3 for number in range(made.num_micro_batches)]


def shares_of(sizes: list[int]) -> list[float]:
    return [size / sum(sizes) for size in sizes]


def _run(rank: int, world_size: int, text: str) -> tuple[float, dict[str, Any], int, int, float]:
    """The loss, gradients, bytes sent and by formula, and the loss of a forward alone."""
    made_plan = made(text, world_size)
    check(made_plan)
    layers = layers_of(text, made_plan)
    chunks = {chunk: models.Stage(layers[chunk], max(layers) + 1) for chunk in made_plan.chunks_of(rank)}
    sizes = sizes_of(made_plan)
    batches = models.micro_batches(sizes)
    mailbox = Mailbox(None, Topology(world_size, 1), checked=" always" in text, window=2)
    runner = Runner(made_plan, chunks, mailbox, models.shape, dtype=torch.float64)
    evaluated = runner.evaluate(batches, shares_of(sizes)).item()
    before = mailbox.meter.snapshot().sent_bytes
    loss = runner.run(batches, shares_of(sizes)).item()
    sent = mailbox.meter.snapshot().sent_bytes - before
    for nodes in nodes_alike(text):
        group = dist.new_group(nodes)
        for param in (each for chunk in chunks.values() for each in chunk.parameters()) if rank in nodes else ():
            assert param.grad is not None, "every node has work"
            dist.all_reduce(param.grad, group=group)
    mailbox.close()
    gradients = {
        f"{chunk}.{name}": param.grad.numpy()
        for chunk, stage in chunks.items()
        for name, param in stage.named_parameters()
        if param.grad is not None
    }
    return loss, gradients, sent, runner.sent_bytes(batches), evaluated


# "weights micro-batches": of a few steps; "kept mode micro-batches": the most bytes at once in one.
WEIGHTS = ["weights 1", "weights 3", "weights 4"]
KEPT = ["kept never 1", "kept never 4", "kept always 4"]
NUM_CELLS, BATCH = 4, 12


class Cells(nn.Module):
    """A rank's part of four cells of two layers, in order."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        each = NUM_CELLS // num_ranks
        self.cells = nn.ModuleList(models.Stage(rank * each + number, NUM_CELLS) for number in range(each))
        # Of what arrived, how much is still there.
        self.arrived: list[Any] = []
        self.most_arrived = 0

    def forward(self, hidden: Tensor | None, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        if hidden is not None:
            self.arrived.append(weakref.ref(hidden))
            there = {id(tensor) for each in self.arrived if (tensor := each()) is not None}
            self.most_arrived = max(self.most_arrived, len(there))
        for cell in self.cells:
            hidden = cell(hidden, micro_batch)
        assert hidden is not None
        return hidden


def cut_batch(num: int) -> list[tuple[Tensor, Tensor]]:
    ((tokens, targets),) = models.micro_batches([BATCH])
    return list(zip(tokens.chunk(num), targets.chunk(num), strict=True))


def _weights(rank: int, world_size: int, num: int) -> dict[str, Any]:
    """The weights after three steps of AdamW."""
    cells = Cells(rank, world_size)
    mailbox = Mailbox(None, Topology(world_size, 1))
    runner = Runner(plan("gpipe", world_size, num), {rank: cells}, mailbox, models.shape, dtype=torch.float64)
    optimizer = torch.optim.AdamW(cells.parameters(), lr=1e-2)
    for _ in range(3):
        runner.run(cut_batch(num))
        optimizer.step()
        optimizer.zero_grad()
    mailbox.close()
    each = NUM_CELLS // world_size
    return {
        f"{rank * each + number}.{name}": param.detach().numpy()
        for number, cell in enumerate(cells.cells)
        for name, param in cell.named_parameters()
    }


class Saved:
    """A tensor that a graph keeps. live: bytes of those that are there, and the most so far."""

    def __init__(self, tensor: Tensor, live: list[int]) -> None:
        self.tensor, self.live = tensor, live
        live[0] += tensor.nbytes
        live[1] = max(live)

    def __del__(self) -> None:
        self.live[0] -= self.tensor.nbytes


def _kept(rank: int, world_size: int, mode: str, num: int) -> tuple[int, int]:
    """The most bytes that graphs keep at once in a step with the same micro-batches, and the most inputs."""
    cells, live = Cells(rank, world_size), [0, 0]
    mailbox = Mailbox(None, Topology(world_size, 1))
    made_plan = recompute(plan("gpipe", world_size, num), mode)
    runner = Runner(made_plan, {rank: cells}, mailbox, models.shape, dtype=torch.float64)
    weights = {param.data_ptr() for param in cells.parameters()}

    def keep(tensor: Tensor) -> Any:
        return tensor if tensor.data_ptr() in weights else Saved(tensor, live)

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it.tensor if isinstance(it, Saved) else it)
    with hooks:
        runner.run(models.micro_batches([3] * num))
    mailbox.close()
    assert not live[0]
    return live[1], cells.most_arrived


def _row(rank: int, world_size: int, text: str) -> Any:
    kind, *rest = text.split()
    if kind == "weights":
        return _weights(rank, world_size, int(rest[0]))
    if kind == "kept":
        return _kept(rank, world_size, rest[0], int(rest[1]))
    return _run(rank, world_size, text)


@pytest.fixture(scope="module", params=[2, 4])
def rows(request: pytest.FixtureRequest) -> tuple[int, Rows]:
    size: int = request.param
    return size, run_rows(_row, [*PLANS[str(size)], *WEIGHTS, *KEPT], size, local_size=1)


def test_weights_depend_on_no_number_of_ranks_and_micro_batches(rows: tuple[int, Rows]) -> None:
    whole = Cells(0, 1)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for _ in range(3):
        whole(None, cut_batch(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(whole.cells.named_parameters())
    for text in WEIGHTS:
        found = {name: value for row in rows[1].of(text) for name, value in row.items()}
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert abs(value - expected[name].detach().numpy()).max() <= 1e-10, (text, name)


def test_a_stage_that_recomputes_keeps_inputs_and_one_micro_batch_s_graph(rows: tuple[int, Rows]) -> None:
    told = rows[1]
    for rank, (one, all_four, again) in enumerate(zip(*map(told.of, KEPT), strict=True)):
        assert all_four[0] == 4 * one[0] and again[0] == one[0] > 0
        # The first rank is given tokens alone.
        assert again[1] == (4 if rank else 0)


def test_gradients_are_those_of_one_process(rows: tuple[int, Rows]) -> None:
    size, told = rows
    for text in PLANS[str(size)]:
        made_plan = made(text, size)
        sizes = sizes_of(made_plan)
        layers = layers_of(text, made_plan)
        paths = [tuple(layers[chunk] for chunk in path) for path in made_plan.paths]
        loss, expected = models.alone(paths, sizes, shares_of(sizes))
        found = told.of(text)
        assert abs(sum(row[0] for row in found) - loss) < 1e-12, text
        assert abs(sum(row[4] for row in found) - loss) < 1e-12, text
        if text.split()[0] in NODES:
            assert all(len(path) == 3 for path in paths), "two stages and the head"
        gradients = [
            (f"{layers[int(chunk)]}.{name}", torch.from_numpy(gradient))
            for row in found
            for (chunk, _, name), gradient in ((each.partition("."), grad) for each, grad in row[1].items())
        ]
        assert {name for name, _ in gradients} == expected.keys(), text
        for name, gradient in gradients:
            assert (gradient - expected[name]).abs().max() <= 1e-12, (text, name)


def test_micro_batches_of_unequal_length_weigh_by_their_tokens() -> None:
    made_plan = made("gpipe 4", 4)
    sizes, paths = sizes_of(made_plan), list(made_plan.paths)
    by_tokens, alike = (models.alone(paths, sizes, shares)[1] for shares in (shares_of(sizes), [1 / 4] * 4))
    # What ranks sum up with the right weights is tested above; equal weights would be far off.
    assert max(float((by_tokens[name] - alike[name]).abs().max()) for name in alike) > 1e-3


def test_bytes_are_those_of_the_formula(rows: tuple[int, Rows]) -> None:
    size, told = rows
    for text in PLANS[str(size)]:
        made_plan = made(text, size)
        found = told.of(text)
        assert all(row[2] == row[3] for row in found), text
        # Each border between ranks carries each token's hidden state forward, and its gradient back.
        tokens = sizes_of(made_plan)
        crossing = [
            tokens[number]
            for number, path in enumerate(made_plan.paths)
            for a, b in itertools.pairwise(path)
            if made_plan.home[a] != made_plan.home[b]
        ]
        assert sum(row[2] for row in found) == 2 * 8 * models.WIDTH * sum(crossing) > 0, text


def _dropout(rank: int, world_size: int, mode: str) -> Any:
    chunk = models.Stage(rank, world_size, dropout=0.5)
    mailbox = Mailbox(None, Topology(world_size, 1))
    runner = Runner(recompute(plan("1f1b", 2, 4), mode), {rank: chunk}, mailbox, models.shape, dtype=torch.float64)
    torch.manual_seed(rank)
    runner.run(models.micro_batches([3, 3, 3, 3]))
    mailbox.close()
    return [param.grad.numpy() for param in chunk.parameters() if param.grad is not None], torch.rand(1).item()


class Shaped(nn.Module):
    """Two layers, whose output is given in a form of its own."""

    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.form = nn.Linear(4, 4), nn.Linear(4, 4), form

    def forward(self, hidden: Tensor, micro_batch: Any) -> Tensor:
        return self.form(self.second(torch.tanh(self.first(hidden))))


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x, lambda x: x.transpose(0, 1), lambda x: x.view(3, 2, 4), lambda x: x[:1],
        lambda x: torch.cat([x, x]).chunk(2)[0],
    ],
    ids=["whole", "transposed", "view", "slice", "one of several"],
)  # fmt: skip
def test_halves_of_a_backward_from_any_view_are_the_whole_backward(form: Callable[[Tensor], Tensor]) -> None:
    found = []
    for halves in (False, True):
        chunk = Shaped(form)
        visit = VisitState(chunk, torch.randn(2, 3, 4), None, recomputed=False)
        (output,) = visit.forward()
        gradient = torch.randn(output.shape)
        of_input = visit.backward_input(gradient) if halves else visit.backward(gradient)
        if halves:
            assert all(param.grad is None for param in chunk.parameters())
            visit.backward_weight()
        found.append([of_input, *(param.grad for param in chunk.parameters())])
    for whole, half in zip(*found, strict=True):
        assert whole is not None and half is not None and torch.equal(whole, half)


def test_recomputing_draws_the_same_random_numbers() -> None:
    told = run_rows(_dropout, ["never", "always", "except-last"], 2)
    for kept, again, last in zip(told.of("never"), told.of("always"), told.of("except-last"), strict=True):
        assert kept[1] == again[1] == last[1]
        for one, two, three in zip(kept[0], again[0], last[0], strict=True):
            assert (one == two).all() and (one == three).all()


BRIDGES = ((0, 2), (0, 3), (1, 3))


class Bridging(models.Stage):
    """A stage of four; the first two give the last two what these add to their inputs."""

    number = 0

    def forward(self, hidden: Tensor | None, micro_batch: tuple[Tensor, Tensor], *given: Tensor) -> Any:
        if given and hidden is not None:
            hidden = hidden + given[0] * (given[1].tanh() if len(given) == 2 else 1)
        output = super().forward(hidden, micro_batch)
        if self.embedding is not None:
            return output, 2 * output, output.sin()
        return (output, output) if self.number == 1 else output


def bridging(number: int) -> Bridging:
    stage = Bridging(number, 4)
    stage.number = number
    return stage


def bridged(text: str, num_ranks: int) -> Plan:
    order, mode = text.split()
    return recompute(replace(plan(order, num_ranks, 4), bridges=BRIDGES), mode)


def _bridged(rank: int, world_size: int, text: str) -> Any:
    made_plan = bridged(text, world_size)
    chunks = {chunk: bridging(chunk) for chunk in made_plan.chunks_of(rank)}
    mailbox = Mailbox(None, Topology(world_size, 1))
    runner = Runner(made_plan, chunks, mailbox, models.shape, dtype=torch.float64)
    batches = models.micro_batches(SIZES)
    evaluated, before = runner.evaluate(batches).item(), mailbox.meter.snapshot().sent_bytes
    loss = runner.run(batches).item()
    sent = mailbox.meter.snapshot().sent_bytes - before
    mailbox.close()
    found = {chunk: [grads_of(param) for param in stage.parameters()] for chunk, stage in chunks.items()}
    return loss, evaluated, found, sent, runner.sent_bytes(batches)


def grads_of(param: nn.Parameter) -> Any:
    assert param.grad is not None
    return param.grad.numpy()


@pytest.mark.parametrize(
    ("num_ranks", "texts"), [(4, ["1f1b never", "gpipe always"]), (2, ["looped-bfs never", "looped-bfs except-last"])]
)
def test_what_skips_stages_goes_straight_to_its_stage(num_ranks: int, texts: list[str]) -> None:
    stages, total = [bridging(number) for number in range(4)], torch.zeros((), dtype=torch.float64)
    for batch in models.micro_batches(SIZES):
        hidden, to_two, to_three = stages[0](None, batch)
        hidden, second = stages[1](hidden, batch)
        total = total + stages[3](stages[2](hidden, batch, to_two), batch, to_three, second) / len(SIZES)
    total.backward()
    told = run_rows(_bridged, texts, num_ranks)
    for text in texts:
        made_plan = bridged(text, num_ranks)
        check(made_plan)
        for loss, evaluated, found, sent, formula in told.of(text):
            assert sent == formula and (evaluated == loss or abs(evaluated - loss) < 1e-12)
            for chunk, gradients in found.items():
                for gradient, param in zip(gradients, stages[chunk].parameters(), strict=True):
                    assert abs(gradient - grads_of(param)).max() <= 1e-12, (text, chunk)
        assert abs(sum(row[0] for row in told.of(text)) - total.item()) < 1e-12
        # Each hidden state and each bridge crosses once each way, if its ends are on two ranks.
        ends = [*itertools.pairwise(range(4)), *BRIDGES]
        num = sum(made_plan.home[a] != made_plan.home[b] for a, b in ends)
        assert sum(row[3] for row in told.of(text)) == 2 * 8 * models.WIDTH * sum(SIZES) * num
        costs = Costs.even(4, forward_bytes=1.0)
        assert sum(simulate(made_plan, costs).link_bytes.values()) == 2 * num * len(SIZES)


def test_bridges_that_no_path_has_and_halves_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not visit chunk 2 and later 1"):
        check(replace(plan("1f1b", 4, 4), bridges=((2, 1),)))
    with pytest.raises(ConfigError, match="bridges between chunks need whole backwards"):
        check(replace(plan("zbv", 2, 4), bridges=((0, 2),)))
    with pytest.raises(ConfigError, match="two bridges between the same chunks"):
        check(replace(plan("1f1b", 4, 4), bridges=((0, 2), (0, 2))))


SIZES = [3, 5, 2, 6]


class Normed(nn.Module):
    """A stage with batch normalisation in front; of the first stage its input is the same in any cut of a batch."""

    def __init__(self, chunk: int, momentum: float | None) -> None:
        super().__init__()
        self.stage = models.Stage(chunk, 2)
        self.norm = nn.BatchNorm1d(models.WIDTH, momentum=momentum, dtype=torch.float64)

    def forward(self, hidden: Tensor | None, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        embedding, self.stage.embedding = self.stage.embedding, None
        hidden = self.norm(embedding(micro_batch[0]) if embedding is not None else hidden)
        output = self.stage(hidden, micro_batch)
        self.stage.embedding = embedding
        return output


def statistics(chunk: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in chunk.named_buffers()}


def _normalised(rank: int, world_size: int, mode: str) -> Any:
    chunk = Normed(rank, None if mode == "always" else 0.1)
    mailbox = Mailbox(None, Topology(world_size, 1))
    runner = Runner(recompute(plan("1f1b", 2, 4), mode), {rank: chunk}, mailbox, models.shape, dtype=torch.float64)
    batches = models.micro_batches(SIZES)
    runner.evaluate(batches)
    fresh = statistics(chunk)
    found = []
    for _ in range(2):
        runner.run(batches)
        found.append(statistics(chunk))
    mailbox.close()
    assert chunk.norm.track_running_stats
    return fresh, found


@pytest.mark.parametrize("mode", ["never", "always"])
def test_statistics_of_batches_move_once_a_step(mode: str) -> None:
    batches = models.micro_batches(SIZES)
    told = run_rows(_normalised, ["never", "always"], 2).of(mode)
    momentum = None if mode == "always" else 0.1
    chunks = [Normed(number, momentum) for number in range(2)]
    inputs: list[list[Tensor]] = [[], []]
    for number, chunk in enumerate(chunks):
        chunk.norm.register_forward_pre_hook(lambda module, args, at=number: inputs[at].append(args[0].detach()))
    for batch in batches:
        chunks[1](chunks[0](None, batch), batch)
    for rank, (fresh, found) in enumerate(told):
        # torch's own, in one step of all that the micro-batches hold together.
        whole = nn.BatchNorm1d(models.WIDTH, momentum=momentum, dtype=torch.float64)
        assert all(torch.equal(fresh[f"norm.{name}"], value) for name, value in whole.named_buffers())
        for after in found:
            whole(torch.cat(inputs[rank]))
            assert after["norm.num_batches_tracked"] == whole.num_batches_tracked
            for name, value in whole.named_buffers():
                torch.testing.assert_close(after[f"norm.{name}"], value, rtol=1e-12, atol=1e-12)


def _dies(rank: int, world_size: int) -> str | None:
    chunk = models.Stage(rank, world_size)
    mailbox = Mailbox(None, Topology(world_size, 1))
    runner = Runner(plan("1f1b", 4, 4), {rank: chunk}, mailbox, models.shape, dtype=torch.float64)
    batches = models.micro_batches([3] * 4)
    runner.run(batches)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        while True:
            runner.run(batches)
    return str(caught.value)


def test_a_stage_that_dies_is_named_by_all() -> None:
    told = run_workers(_dies, 4, may_die=(2,))
    for rank in (0, 1, 3):
        assert "rank 2 is missing: pipeline_" in told[rank], told[rank]


def _refusals(rank: int, world_size: int) -> None:
    mailbox = Mailbox(None, Topology(1, 1))
    with pytest.raises(ConfigError, match=r"rank 0 was given chunks \[0, 1\]: the plan's are \[0\]"):
        Runner(plan("gpipe", 1, 1), {0: nn.Identity(), 1: nn.Identity()}, mailbox, models.shape)
    counting = nn.InstanceNorm1d(4, track_running_stats=True)
    with pytest.raises(ConfigError, match="keeps statistics of each forward"):
        Runner(recompute(plan("gpipe", 1, 1), "always"), {0: counting}, mailbox, models.shape)
    runner = Runner(plan("gpipe", 1, 2), {0: models.Stage(0, 1)}, mailbox, models.shape, dtype=torch.float64)
    with pytest.raises(ConfigError, match="1 micro-batches, 2 shares: the plan is for 2 of each"):
        runner.run(models.micro_batches([3]))
    runner.run(models.micro_batches([3, 3]))


def test_what_does_not_fit_a_plan_is_refused() -> None:
    _refusals(0, 1)
