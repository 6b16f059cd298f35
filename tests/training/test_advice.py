"""The start-up table says how fast the link is, and whether compression pays on it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import thinwire
from tests.workers import run_workers
from thinwire.compose import apply
from thinwire.device import Device
from thinwire.methods.memory import Residency
from thinwire.table import Row
from thinwire.training import advice
from thinwire.training.engine import Engine
from thinwire.training.soonest import ChosenResidency
from thinwire.training.start_rows import rows_on_links


def advise_on(
    rank: int, world_size: int, local_size: int, strategy: str, bit_per_s: float, machine: int = 1, join: str = ""
) -> list[Row]:
    os.environ.update(LOCAL_WORLD_SIZE=str(machine), MASTER_ADDR=join)
    model = torch.nn.Linear(256, 256)
    _, optimizer = apply(thinwire.strategy_named(strategy),
        model, torch.optim.AdamW(model.parameters()), local_size=local_size, seed=0, timeout_s=300, checked=False,
        overlap=False,
    )  # fmt: skip
    if bit_per_s:
        advice.link_rate = lambda comm: bit_per_s
    return list(advice.advise(optimizer, strategy, 256 * 257, 1024, torch.float32, Device()))


@pytest.mark.parametrize(("bit_per_s", "says"), [(1e3, "pays on this link"), (1e15, "take --strategy zero-bf16")])
def test_compression_is_advised_on_slow_links_alone(bit_per_s: float, says: str) -> None:
    for rows in run_workers(advise_on, 2, 1, "sdp4bit", bit_per_s):
        assert says in rows[1][1]


@pytest.mark.parametrize(("machine", "join"), [(2, ""), (1, "127.0.0.1"), (1, "localhost")])
def test_on_one_machine_it_says_that_loopback_is_no_network(machine: int, join: str) -> None:
    for ((_, effect, why),) in run_workers(advise_on, 2, 1, "sdp4bit", 1e3, machine, join):
        assert effect == "not measured" and "loopback, no network" in why


def test_the_link_is_measured_and_the_ranks_agree() -> None:
    first, second = run_workers(advise_on, 2, 1, "sdp4bit", 0.0)
    assert first[:1] == second[:1]
    assert float(first[0][1].split()[0]) > 0.0


def advised_once(rank: int, world_size: int) -> list[Row]:
    """What is said where the link and computing were measured before, which is not done twice."""
    os.environ.update(LOCAL_WORLD_SIZE="1", MASTER_ADDR="")
    model = torch.nn.Linear(256, 256)
    _, optimizer = apply(thinwire.strategy_named("sdp4bit"),
        model, torch.optim.AdamW(model.parameters()), local_size=1, seed=0, timeout_s=300, checked=False, overlap=False,
    )  # fmt: skip
    engine = SimpleNamespace(
        stage=SimpleNamespace(pipeline=None), batch=SimpleNamespace(tokens_per_step=2048), num_shares=2, dtype="fp32",
        config=SimpleNamespace(strategy="sdp4bit"), optimizer=optimizer, num_parameters=256 * 257, device=Device(),
        choice=ChosenResidency(Residency(), link_rate=1e3, flops=6 * 256 * 257 * 1024 / 2),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name in ("link_rate", "step_flops"):
            patch.setattr(advice, name, None)
        return rows_on_links(cast(Engine, engine))


def test_what_was_measured_for_a_budget_is_not_measured_again() -> None:
    for (_, rate, _), (_, _, why) in run_workers(advised_once, 2):
        assert rate == "0.001 Mbit/s" and "computing takes about 2 s" in why


def test_nothing_is_said_without_compression_or_without_a_link() -> None:
    assert [len(rows) for rows in run_workers(advise_on, 2, 1, "zero", 1e3)] == [1, 1]
    assert run_workers(advise_on, 2, 2, "sdp4bit", 0.0) == [[], []]
