"""FedFix on real processes: held to a replay in one process, bit for bit."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.conformance.strategy_suite import hash_of
from tests.workers import run_workers
from thinwire.codecs import Integer
from thinwire.errors import ConfigError, PeerLostError
from thinwire.islands.ticks import CLOCK, CLOCK_BYTES, STATUS_BYTES, RoundsIsland, Tick
from thinwire.methods.islands.fedfix import FedFix

LR, JOB, SLOW, SLOW_TICKS = 0.1, 2, 3, 8


class Point(nn.Module):
    """f_i(x) = 0.5 |x - i|^2 in two tensors of 3 elements."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
        self.rank = rank

    def forward(self) -> Tensor:
        return 0.5 * (torch.cat([self.first, self.second]) - self.rank).square().sum()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Tensor) -> float:
    loss = model(*args)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


class Recorded(RoundsIsland):
    """Keeps what it hands in, the server after each tick, and who took part."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self.history: list[Tick] = []
        self.servers: list[Tensor] = []
        self.given = torch.zeros(())
        super().__init__(model, optimizer, FedFix(**options), on_tick=self.keep, announce=False)

    def keep(self, tick: Tick) -> None:
        self.history.append(tick)
        self.servers.append(self._server.clone())

    def _hand_in(self) -> None:
        self.given = self.given + (self._model.read() - self._begun)
        super()._hand_in()


def quadratics(rank: int, weights: str, num_ticks: int) -> dict[str, Any]:
    model = Point(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    before = 0
    options: Any = {"interval_s": 0.01, "local_steps": JOB, "weighting": weights}
    if weights != "importance":
        options["max_ticks"] = 1000
    with Recorded(model, optimizer, codec="fp32", **options) as fed:
        steps = 0
        while fed.ticks < num_ticks:
            if rank == SLOW and steps % JOB == JOB - 1:
                while fed.ticks < min(before + SLOW_TICKS - 1, num_ticks):
                    time.sleep(0.001)
            step_of(model, optimizer)
            before = fed.ticks if steps % JOB == JOB - 1 else before
            steps += 1
    reading = fed.meter.snapshot()
    return {
        "history": fed.history,
        "servers": torch.stack(fed.servers),
        "model": fed._model.read(),
        "steps": steps,
        "jobs": fed.jobs,
        "sent": (reading.sent_by("hand_in"), fed.jobs * fed.bytes_per_job),
        "words": (
            reading.sent_by("clock") + reading.operations["all_gather_exact", "inter"].sent_bytes,
            fed.ticks * (fed.comm.world_size - 1) * (STATUS_BYTES + CLOCK_BYTES * (rank == CLOCK)),
        ),
    }


def replay(history: list[Tick], steps: list[int]) -> list[Tensor]:
    """The same run in one process, from who took part at which tick."""
    server, left = torch.zeros(3), list(steps)
    begun = [torch.zeros(3)] * len(steps)
    servers = []
    for tick in history:
        total = torch.zeros(3)
        for rank, weight in zip(tick.finished, tick.weights, strict=True):
            model = Point(rank)
            with torch.no_grad():
                model.first.copy_(begun[rank][:1])
                model.second.copy_(begun[rank][1:])
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for _ in range(min(JOB, left[rank])):
                step_of(model, optimizer)
            left[rank] -= min(JOB, left[rank])
            end = torch.cat([model.first.detach(), model.second.detach()])
            total.add_(end - begun[rank], alpha=weight)
        if tick.finished:
            server = server.add(total, alpha=1.0)
        for rank in tick.finished:
            begun[rank] = server
        servers.append(server)
    assert left == [0] * len(steps)
    return servers


def islands(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {name: quadratics(rank, name, 150) for name in ("ticks", "importance")}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(64, 4, generator=generator)
    y = x.prod(1, keepdim=True).tanh() + x.sum(1, keepdim=True)
    options: Any = {"interval_s": 0.01, "local_steps": 5, "weighting": "estimated", "overlap": True, "max_ticks": 4}

    def mse() -> Tensor:
        return (model(x) - y).square().mean()

    losses, moved = [float(mse().detach())], torch.zeros(())
    with Recorded(model, optimizer, **options) as fed:
        while fed.ticks < 60:
            optimizer.zero_grad()
            mse().backward()
            before = fed._model.read()
            # Without the hook, so that what comes from the server is not counted as this rank's.
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
            moved = moved + (fed._model.read() - before)
            fed._after_step()
            time.sleep(0.004 if rank == 3 else 0.0)
    losses.append(float(mse().detach()))
    state = fed.state_dict()
    again = thinwire.FedFix(model, optimizer, announce=False, **options)
    # The ranks' states are some ticks apart in a run; the newest is taken.
    if rank != 2:
        state["state"]["ticks"] -= 1
        state["state"]["server"]["model"] += 1
    again.load_state_dict(state)
    with again:
        pass
    results["network"] = {
        "losses": losses,
        "hash": hash_of(model),
        "servers": torch.stack(fed.servers),
        "kept": (fed.given, moved),
        "resumed": (again.ticks - fed.ticks, float((again._server - fed._server).abs().max())),
        "codec": fed.codec,
    }
    with pytest.raises(ConfigError, match="other options") as caught:
        thinwire.FedFix(model, optimizer, interval_s=0.01 * (1 + (rank == 1)), local_steps=5)
    results["refusal"] = str(caught.value)
    return results


@pytest.fixture(scope="module")
def run() -> list[dict[str, Any]]:
    return run_workers(islands, 4)


@pytest.mark.parametrize("weights", ["ticks", "importance"])
def test_a_run_is_its_replay_bit_for_bit(run: list[dict[str, Any]], weights: str) -> None:
    results = [result[weights] for result in run]
    history = results[0]["history"]
    expected = torch.stack(replay(history, [result["steps"] for result in results]))
    for result in results:
        assert result["history"] == history
        assert torch.equal(result["servers"], expected)
        assert torch.equal(result["model"], expected[-1])
        assert result["sent"][0] == result["sent"][1] > 0


def test_words_take_the_promised_bytes(run: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(run):
        sent, promised = result["ticks"]["words"]
        # Besides ticks: two digests of 16 bytes for the start's weights and names, one for options, and a barrier.
        assert sent - promised == 3 * (3 * 16 + 1), rank


def test_weights_make_unequal_speed_unbiased(run: list[dict[str, Any]]) -> None:
    means = {name: float(run[0][name]["servers"][75:].mean()) for name in ("ticks", "importance")}
    assert means["ticks"] == pytest.approx(1.5, abs=0.15)
    taken = [sum(rank in tick.finished for tick in run[0]["importance"]["history"]) for rank in range(4)]
    biased = sum(rank * count for rank, count in enumerate(taken)) / sum(taken)
    assert means["importance"] == pytest.approx(biased, abs=0.15)
    assert biased < 1.3


def test_a_slow_island_does_not_slow_the_others(run: list[dict[str, Any]]) -> None:
    jobs = [result["ticks"]["jobs"] for result in run]
    assert min(jobs[:3]) > 2 * jobs[SLOW] > 0


def test_a_network_learns_at_four_bits_while_deltas_travel(run: list[dict[str, Any]]) -> None:
    results = [result["network"] for result in run]
    assert len({result["hash"] for result in results}) == 1
    for result in results:
        assert result["codec"] == Integer()
        assert torch.equal(result["servers"], results[0]["servers"])
        assert result["losses"][1] < 0.5 * result["losses"][0]
        # Every step was handed in, and once.
        given, moved = result["kept"]
        assert torch.allclose(given, moved, atol=2e-5)
        ticks, drift = result["resumed"]
        assert ticks >= 1 and drift == 0.0


def test_ranks_must_agree_on_options(run: list[dict[str, Any]]) -> None:
    assert all("rank 1 has other options than rank 0" in result["refusal"] for result in run)


def one_rank_dies(rank: int, world_size: int) -> str:
    model = Point(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(PeerLostError) as caught:
        with thinwire.FedFix(model, optimizer, interval_s=0.01, local_steps=JOB, announce=False) as fed:
            while True:
                step_of(model, optimizer)
                if rank == 1 and fed.ticks > 5:
                    os.kill(os.getpid(), signal.SIGKILL)
    return str(caught.value)


def test_a_lost_island_is_named() -> None:
    results = run_workers(one_rank_dies, 3, may_die=(1,))
    assert all("rank 1 is missing" in results[rank] for rank in (0, 2))


def test_one_island_needs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    model = Point(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with thinwire.FedFix(model, optimizer, interval_s=0.001, local_steps=1, max_ticks=1, announce=False) as fed:
        for _ in range(20):
            begun = fed.ticks
            while fed.ticks < begun + 2:
                time.sleep(0.0005)
            step_of(model, optimizer)
    assert fed.jobs == 20 and fed.meter.snapshot().sent_bytes == 0
    assert float(model.first.detach()) == pytest.approx(3 * (1 - 0.9**20))
    # Said once.
    assert [record.message.split(" took ")[0] for record in caplog.records] == ["thinwire: a job of rank 0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval_s": 700.0}, "below timeout_s"),
        ({"importance": [1.0, 2.0]}, "one number above 0 for each of the 1"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    model = Point(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(ConfigError, match=message):
        thinwire.FedFix(model, optimizer, **({"interval_s": 0.1, "local_steps": 1} | options))
