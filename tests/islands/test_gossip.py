"""Gossip: constants of graphs, events held to published counts, and real processes held to a replay."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.conformance.strategy_suite import hash_of
from tests.workers import run_workers
from thinwire import ConfigError, PeerLostError
from thinwire.codecs import derive_seed
from thinwire.islands.meetings import GradientNode
from thinwire.methods.islands.dadao import DADAO, Z_TILDE, DadaoLaw, X, Z
from thinwire.methods.islands.gossip import A2CiD2
from thinwire.methods.own_pace.graph import Graph, Meeting, Mixing
from thinwire.methods.own_pace.pairs import Law


@pytest.mark.parametrize("n", [2, 4, 7, 10])
def test_constants_of_graphs_have_their_closed_forms(n: int) -> None:
    ring, star, complete = (Graph.of(name, n) for name in ("ring", "star", "complete"))
    assert complete.chi1 == pytest.approx((n - 1) / 2) == pytest.approx(complete.chi2)
    num_edges, slowest = len(ring.edges), 2 - 2 * math.cos(2 * math.pi / n) if n > 2 else 2.0
    assert ring.chi1 == pytest.approx(num_edges / slowest)
    for graph in (ring, star, complete):
        assert graph.chi2 == pytest.approx((n - 1) / 2)
        assert graph.chi2 <= graph.chi1 * (1 + 1e-9)
    path = Graph.of([(i + 1, i) for i in range(n - 1)], n)
    assert path.edges == tuple((i, i + 1) for i in range(n - 1))


def test_constants_are_the_published_ones() -> None:
    constants = {name: (g := Graph.of(name, 10), DadaoLaw(g, 10.0, 1.0)) for name in ("ring", "complete", "star")}
    published = {"ring": (26.18, 4.5, 15.35), "complete": (4.5, 4.5, 6.36), "star": (9.0, 4.5, 9.0)}
    for name, (graph, law) in constants.items():
        assert (graph.chi1, graph.chi2, law.rate) == pytest.approx(published[name], rel=1e-3)


@pytest.mark.parametrize(
    ("graph", "n", "message"),
    [
        ("rings", 4, "did you mean 'ring'"),
        ([(0, 1), (2, 3)], 4, "do not connect 4 nodes"),
        ([(0, 4)], 4, r"edge \(0, 4\): two nodes from 0 to 3"),
        ([(1, 1)], 2, r"edge \(1, 1\)"),
        ("ring", 1, "at least 2"),
    ],
)
def test_graphs_that_cannot_work_are_refused(graph: Any, n: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Graph.of(graph, n)


def test_meetings_are_poisson_and_alike() -> None:
    graph = Graph.of("ring", 5)
    drawn = list(islice(graph.meetings(2.5, seed=5), 4000))
    assert drawn == list(islice(graph.meetings(2.5, seed=5), 4000))
    assert [meeting.number for meeting in drawn] == list(range(4000))
    gaps = torch.tensor([meeting.time for meeting in drawn], dtype=torch.float64).diff()
    assert float(gaps.mean()) == pytest.approx(0.4, rel=0.05) == pytest.approx(float(gaps.std()), rel=0.05)
    for edge in graph.edges:
        assert sum(meeting.edge == edge for meeting in drawn) == pytest.approx(800, rel=0.1)


def laws(graph: Graph) -> list[Law]:
    return [DadaoLaw(graph, 10.0, 1.0), A2CiD2(graph, 3.0), A2CiD2(graph, 3.0, accelerated=False)]


def test_mixing_is_the_exponential_of_its_matrix() -> None:
    for law in laws(Graph.of("ring", 6)):
        mixing = law.mixing
        whole = mixing.after(0.7)
        assert torch.allclose(whole, torch.linalg.matrix_exp(0.7 * mixing.matrix), atol=1e-12)
        assert torch.allclose(whole, mixing.after(0.4) @ mixing.after(0.3), atol=1e-12)
        assert torch.allclose(whole, integrated(mixing, 0.7), atol=1e-8)


def integrated(mixing: Mixing, duration: float, num_steps: int = 400) -> Tensor:
    """By Runge and Kutta's method."""
    a, h = mixing.matrix, duration / num_steps
    state = torch.eye(a.shape[0], dtype=torch.float64)
    for _ in range(num_steps):
        k1 = a @ state
        k2 = a @ (state + h / 2 * k1)
        k3 = a @ (state + h / 2 * k2)
        state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + a @ (state + h * k3))
    return state


class Nodes:
    """States of all nodes, fp64, each at the time of its own last event."""

    def __init__(self, law: Law, starts: list[Tensor]) -> None:
        self.law, self.mixing = law, law.mixing
        self.states = [law.start(start) for start in starts]
        self.times = [0.0] * len(starts)

    def bring_to_(self, node: int, when: float) -> None:
        if when > self.times[node]:
            self.mixing.apply_(self.states[node], when - self.times[node])
            self.times[node] = when

    def meet(self, meeting: Meeting) -> None:
        i, j = meeting.edge
        for node in meeting.edge:
            self.bring_to_(node, meeting.time)
        m = self.law.message(self.states[i]) - self.law.message(self.states[j])
        self.law.meet_(self.states[i], m)
        self.law.meet_(self.states[j], -m)

    def synchronise(self) -> Tensor:
        """All states at one time, [nodes, V, n]."""
        for node in range(len(self.states)):
            self.bring_to_(node, max(self.times))
        return torch.stack(self.states)


class Quadratics:
    """f_i = 0.5 (x - c_i)^T Q_i (x - c_i), eigenvalues of Q_i from 1 to L; as its own minimisers differ, so does x*."""

    def __init__(self, num_nodes: int, smoothness: float, size: int = 5, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.matrices, self.centres = [], []
        for _ in range(num_nodes):
            draw = torch.randn(size, size, generator=generator, dtype=torch.float64)
            basis = torch.linalg.qr(draw)[0]
            self.matrices.append(basis @ torch.diag(torch.linspace(1, smoothness, size).double()) @ basis.T)
            self.centres.append(torch.randn(size, generator=generator, dtype=torch.float64))
        pull = torch.stack([q @ c for q, c in zip(self.matrices, self.centres, strict=True)]).sum(0)
        self.best = torch.linalg.solve(torch.stack(self.matrices).sum(0), pull)

    def gradient(self, node: int, x: Tensor) -> Tensor:
        return self.matrices[node].to(x.dtype) @ (x - self.centres[node].to(x.dtype))


def gradients(num_nodes: int, seed: int) -> Iterator[tuple[float, int]]:
    """(time, node): one in a unit of time for each node, on average."""
    draw, now = random.Random(seed), 0.0
    while True:
        now += draw.expovariate(num_nodes)
        yield now, draw.randrange(num_nodes)


def descend(graph: str, smoothness: float, gossip: bool = True, n: int = 10) -> tuple[int, int, Nodes, Quadratics]:
    """DADAO until the mean squared distance has fallen by 1e6; (gradients, meetings, nodes, problem)."""
    problem, net = Quadratics(n, smoothness), Graph.of(graph, n)
    law = DadaoLaw(net, smoothness, 1.0)
    nodes = Nodes(law, [torch.zeros(5, dtype=torch.float64)] * n)
    targets = torch.stack([problem.best] * n if gossip else problem.centres)
    meetings = net.meetings(law.rate, seed=1)
    meeting, num_meetings = next(meetings), 0
    for count, (when, node) in enumerate(gradients(n, seed=2), start=1):
        while gossip and meeting.time < when:
            nodes.meet(meeting)
            meeting, num_meetings = next(meetings), num_meetings + 1
        nodes.bring_to_(node, when)
        law.gradient_(nodes.states[node], problem.gradient(node, nodes.states[node][X]))
        if count % 8:
            continue
        distances = torch.stack([state[X] for state in nodes.states]) - targets
        if float(distances.square().sum()) < 1e-6 * float(targets.square().sum()):
            return count, num_meetings, nodes, problem
        assert count < 10_000
    raise AssertionError


@pytest.fixture(scope="module")
def descents() -> dict[tuple[str, float], tuple[int, int, Nodes, Quadratics]]:
    asked = (("ring", 10.0), ("ring", 40.0), ("complete", 10.0), ("star", 10.0))
    return {key: descend(*key) for key in asked}


def test_counts_of_gradients_and_meetings_are_the_published_ones(descents: dict) -> None:
    published = {("ring", 10.0): (2662, 4159), ("ring", 40.0): (5254, 8160), ("complete", 10.0): (2834, 1819)}
    published |= {("star", 10.0): (2767, 2536)}
    for key, (num_gradients, num_meetings, nodes, _) in descents.items():
        assert num_gradients == pytest.approx(published[key][0], rel=0.2)
        assert num_meetings == pytest.approx(published[key][1], rel=0.2)
        assert num_meetings / num_gradients == pytest.approx(nodes.law.rate / 10, rel=0.1)
    assert 1.7 < descents["ring", 40.0][0] / descents["ring", 10.0][0] < 2.3
    for graph in ("complete", "star"):
        assert descents[graph, 10.0][0] == pytest.approx(descents["ring", 10.0][0], rel=0.1)


def test_what_one_gains_the_other_loses(descents: dict) -> None:
    for *_, nodes, _ in descents.values():
        states = nodes.synchronise()
        for vector in (Z, Z_TILDE):
            assert float(states[:, vector].abs().max()) > 0.1
            assert float(states[:, vector].sum(0).abs().max()) < 1e-10


def test_without_gossip_every_node_finds_its_own_minimum() -> None:
    num_gradients, *_, nodes, problem = descend("ring", 10.0, gossip=False)
    assert num_gradients == pytest.approx(1792, rel=0.3)
    distances = torch.stack([state[X] - problem.best for state in nodes.states]).norm(dim=1)
    assert float(distances.min()) > 0.1


def test_the_second_vector_speeds_up_gossip_on_a_ring() -> None:
    n = 32
    graph = Graph.of("ring", n)
    spreads = []
    for accelerated in (False, True):
        starts = torch.randn(n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        nodes = Nodes(A2CiD2(graph, n / 2, accelerated), list(starts))
        for meeting in islice(graph.meetings(n / 2, seed=0), 2000):
            nodes.meet(meeting)
        states = nodes.synchronise()
        assert torch.allclose(states.mean(0), starts.mean(0).expand(2, -1), atol=1e-12)
        spreads.append(float((states[:, 0] - starts.mean(0)).norm()))
    assert spreads[1] < 0.5 * spreads[0] < 1.0


NODES, STEP_S, SMOOTHNESS = 4, 0.002, 4.0


class Quadratic(nn.Module):
    """One node's function, its x in two tensors."""

    def __init__(self, problem: Quadratics, rank: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, 1))
        self.matrix, self.centre = problem.matrices[rank].float(), problem.centres[rank].float()

    def forward(self) -> Tensor:
        offset = torch.cat([self.first, self.second.flatten()]) - self.centre
        return 0.5 * offset @ self.matrix @ offset


class Logged(DadaoLaw):
    """Keeps every event that it is asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        object.__setattr__(self, "events", [])

    def gradient_(self, state: Tensor, gradient: Tensor) -> None:
        self.events.append(gradient)  # type: ignore[attr-defined]
        super().gradient_(state, gradient)

    def meet_(self, state: Tensor, difference: Tensor) -> None:
        self.events.append(None)  # type: ignore[attr-defined]
        super().meet_(state, difference)


class Timed(GradientNode):
    """Says when each event was."""

    def _timed(self, event: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any) -> None:
            self.at.append(self._at)
            event(*args)

        return noted

    def __enter__(self) -> Self:
        self.law = Logged(self.graph, SMOOTHNESS, 1.0)
        self.at: list[float] = []
        law = self.law
        for name in ("gradient_", "meet_"):
            object.__setattr__(law, name, self._timed(getattr(law, name)))
        return super().__enter__()


def dadao(rank: int, until: float, *, delay_steps: int = 3, **options: Any) -> dict[str, Any]:
    problem = Quadratics(NODES, SMOOTHNESS)
    model = Quadratic(problem, rank)
    method = DADAO(smoothness=SMOOTHNESS, strong_convexity=1.0, step_s=STEP_S, **options)
    with Timed(model, method, announce=False, seed=7) as gossip:
        while gossip.now() < until:
            model().backward()
            if rank == 3:
                time.sleep(delay_steps * STEP_S)
            gossip.step()
            gossip.zero_grad()
        with pytest.raises(ConfigError, match="outside of the context"):
            gossip.state_dict()
    reading = gossip.meter.snapshot()
    events = gossip.law.events  # type: ignore[attr-defined]
    gossip.close()
    return {
        "state": gossip.state,
        "events": list(zip(gossip.at, events, strict=True)),
        "at": gossip._at,
        "error": float((gossip.state[X] - problem.best).norm() / problem.best.norm()),
        "steps": gossip.steps,
        "meetings": gossip.meetings,
        "sent": (reading.sent_by("gossip"), gossip.meetings * gossip.bytes_per_meeting),
        "hash": hash_of(model),
    }


def network(rank: int, graph: Any) -> dict[str, Any]:
    """A2CiD2 around Adam; saved, loaded and gone on with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(64, 4, generator=generator)
    y = x.sum(1, keepdim=True) + rank - 1.5

    def loss() -> Tensor:
        return (model(x) - y).square().mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    gossip = thinwire.Gossip(model, optimizer, step_s=STEP_S, graph=graph, announce=False)
    start = gossip.state.clone()
    before = 0.0
    for _ in range(2):
        with gossip:
            for _ in range(30):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
            before = float(loss().detach())
        saved = gossip.state_dict()
        gossip.state.zero_()
        gossip.load_state_dict(saved)
    with pytest.raises(ConfigError, match="other options"):
        thinwire.Gossip(model, optimizer, step_s=STEP_S * (1 + rank), graph=graph)
    return {
        "start": start[0],
        "state": gossip.state,
        "hash": hash_of(model),
        "steps": gossip.steps,
        "before": before,
        "after": float(loss().detach()),
    }


def every_kind(rank: int, world_size: int) -> dict[str, Any]:
    results = {"dadao": dadao(rank, 120.0, delay_steps=8), "network": network(rank, "star")}
    DadaoLaw.meet_ = lambda *_: None  # type: ignore[method-assign]
    results["alone"] = dadao(rank, 80.0)
    return results


@pytest.fixture(scope="module")
def run() -> list[dict[str, Any]]:
    return run_workers(every_kind, NODES)


def test_all_nodes_find_the_minimum_of_the_sum(run: list[dict[str, Any]]) -> None:
    results = [result["dadao"] for result in run]
    assert max(result["error"] for result in results) < 0.03
    assert len({result["hash"] for result in results}) == 1
    # Ranks do what they can: the last one sleeps in each of its steps.
    assert sum(result["steps"] for result in results[:3]) / 3 > results[3]["steps"]


def test_a_run_is_its_replay_bit_for_bit(run: list[dict[str, Any]]) -> None:
    results = [result["dadao"] for result in run]
    graph = Graph.of("ring", NODES)
    nodes = Nodes(DadaoLaw(graph, SMOOTHNESS, 1.0), [torch.zeros(5)] * NODES)
    law = nodes.law
    assert isinstance(law, DadaoLaw)
    waiting = [list(reversed(result["events"])) for result in results]

    def take_gradients(node: int) -> None:
        while waiting[node] and waiting[node][-1][1] is not None:
            when, gradient = waiting[node].pop()
            nodes.bring_to_(node, when)
            law.gradient_(nodes.states[node], gradient)

    had = {float(when) for result in results for when, gradient in result["events"] if gradient is None}
    for meeting in graph.meetings(law.rate, derive_seed(7, 1)):
        for node in range(NODES):
            take_gradients(node)
        if not any(waiting):
            break
        if meeting.time in had:
            for node in meeting.edge:
                when, gradient = waiting[node].pop()
                assert gradient is None and when == meeting.time
            nodes.meet(meeting)
    for node, result in enumerate(results):
        nodes.bring_to_(node, max(result["at"] for result in results))
        assert torch.equal(nodes.states[node], result["state"])


def test_sums_are_kept_and_bytes_promised(run: list[dict[str, Any]]) -> None:
    results = [result["dadao"] for result in run]
    states = torch.stack([result["state"] for result in results])
    assert len({result["at"] for result in results}) == 1
    for vector in (Z, Z_TILDE):
        assert float(states[:, vector].abs().max()) > 0.1
        assert float(states[:, vector].sum(0).abs().max()) < 1e-4
    for result in results:
        assert result["sent"][0] == result["sent"][1] > 0
    # Each meeting has two sides; 2.45 meetings of the ring in a unit of time.
    num_meetings = sum(result["meetings"] for result in results) / 2
    assert num_meetings == pytest.approx(math.sqrt(6) * results[0]["at"], rel=0.25)


def test_nodes_without_meetings_find_their_own_minima(run: list[dict[str, Any]]) -> None:
    problem = Quadratics(NODES, SMOOTHNESS)
    for rank, result in enumerate(run):
        x = result["alone"]["state"][X]
        assert float((x - problem.centres[rank]).norm()) < 0.05
        assert result["alone"]["error"] > 0.1


def test_a_network_agrees_and_goes_on_from_its_state(run: list[dict[str, Any]]) -> None:
    results = [result["network"] for result in run]
    states = torch.stack([result["state"] for result in results])
    assert len({result["hash"] for result in results}) == 1
    # Both vectors have one mean, since whatever moves one moves the other.
    means = states.mean(0)
    assert torch.allclose(means[0], means[1], atol=1e-5)
    assert float((states[:, 0] - means[0]).norm() / 2 / means[0].norm()) < 0.1
    assert all(result["steps"] == 60 for result in results)
    # Own targets lie at -1.5 .. 1.5: what all agree on has lost 0.25 and 2.25 to them, which is 1.25 on average.
    assert sum(result["after"] for result in results) / NODES == pytest.approx(1.25, abs=0.5)


def one_rank_dies(rank: int, world_size: int) -> str:
    problem = Quadratics(NODES, SMOOTHNESS)
    model = Quadratic(problem, rank)
    options: Any = {"smoothness": SMOOTHNESS, "strong_convexity": 1.0, "step_s": STEP_S}
    with pytest.raises(PeerLostError) as caught:
        with thinwire.DADAO(model, graph="complete", announce=False, **options) as gossip:
            while True:
                model().backward()
                gossip.step()
                gossip.zero_grad()
                if rank == 1 and gossip.steps > 10:
                    os.kill(os.getpid(), signal.SIGKILL)
    return str(caught.value)


def test_a_lost_neighbour_is_named() -> None:
    results = run_workers(one_rank_dies, 3, may_die=(1,))
    assert all("rank 1 is missing" in results[rank] for rank in (0, 2))


@pytest.mark.parametrize("smoothness", [2.0, 3.0, 4.0, 10.0, 100.0])
def test_time_alone_keeps_states_bounded(smoothness: float) -> None:
    """L = 3, mu = 1 has a double eigenvalue, for which a solver may give the same eigenvector twice."""
    mixing = DadaoLaw(Graph.of("ring", 2), smoothness, 1.0).mixing
    for duration in (0.1, 1.0, 500.0):
        matrix = mixing.after(duration)
        half = mixing.after(duration / 2)
        torch.testing.assert_close(half @ half, matrix, rtol=0, atol=1e-9)
        # x and x~ go towards each other, and keep their mean.
        torch.testing.assert_close(matrix[:2, :2].sum(0), torch.ones(2, dtype=torch.float64))
        assert float(matrix.abs().max()) < 100


@pytest.mark.parametrize(("smoothness", "strong_convexity"), [(1.0, 2.0), (1.0, 0.0), (0.0, 0.0)])
def test_constants_that_cannot_be_are_refused(smoothness: float, strong_convexity: float) -> None:
    with pytest.raises(ConfigError, match="strong_convexity"):
        DadaoLaw(Graph.of("ring", 3), smoothness, strong_convexity)
