"""Machines of which all is known, and plans for them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from thinwire.calibration.machine import CODECS
from thinwire.cost import Cores, Machine, Network
from thinwire.errors import ConfigError
from thinwire.planner.candidates import Candidate
from thinwire.planner.islands import price
from thinwire.planner.plan import plan
from thinwire.planner.search import Priced
from thinwire.planner.training_plan import TrainingPlan

FAST, SLOW = 12.5e6, 1.25e6
RATES = {"layer 64 fp32": 4e9, "launch 64 fp32": 1e4, "layer 512 fp32": 4e11, "launch 512 fp32": 1e4, "copy": 5e9}
RATES |= {"carry": 5e8, "round": 2e3} | {f"{way} {codec}": 5e8 for way in ("encode", "decode") for codec in CODECS}


def machine(rate: float, bad: tuple[int, int] | None = None, num_ranks: int = 4) -> Machine:
    """Ranks with a core each, and links that are all alike but one."""
    ranks = range(num_ranks)
    rates = tuple(tuple(SLOW if bad in ((a, b), (b, a)) else rate for b in ranks) for a in ranks)
    network = Network(tuple(ranks), rates, ((1e-3,) * num_ranks,) * num_ranks, 0.02)
    return Machine(("a",) * num_ranks, network, Cores(tuple(ranks), (1.0,) * num_ranks), RATES)


def planned(made: Machine, **more: object) -> TrainingPlan:
    return plan("demo", made, tokens_per_step=8192, micro_batch=8, **more)  # type: ignore[arg-type]


def racks(inside: float, across: float) -> Machine:
    """Two racks of two ranks."""
    rates = tuple(tuple(inside if a // 2 == b // 2 else across for b in range(4)) for a in range(4))
    made = machine(inside)
    return replace(made, network=replace(made.network, rates=rates))


def near(rate: float) -> Machine:
    """Two nodes of two ranks, whose links inside are fast."""
    made, nodes = machine(rate), (0, 0, 1, 1)
    rates = tuple(tuple(1e11 if a == b else rate for b in nodes) for a in nodes)
    return replace(made, network=Network(nodes, rates, ((1e-6,) * 4,) * 4))


def small(made: Machine, model: str = "tiny", **more: object) -> TrainingPlan:
    return plan(model, made, tokens_per_step=2048, micro_batch=2, **more)  # type: ignore[arg-type]


def priced_of(found: TrainingPlan, ways: Iterable[Candidate]) -> list[Priced]:
    """The prices of those that can run."""
    prices = []
    for way in ways:
        with suppress(ConfigError):
            prices.append(price(found.pricing, way))
    return prices
