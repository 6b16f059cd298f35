"""The simulated relay of a spread head: what each link carries, and that with two ranks it is no other step."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.cost import Network
from thinwire.methods.pipeline import Costs, simulate
from thinwire.methods.pipeline.orders import SPREAD_ORDERS
from thinwire.methods.pipeline.simulate import SpreadCosts

SPEC = importlib.util.spec_from_file_location("vocabulary", Path(__file__).parents[2] / "benchmarks/vocabulary.py")
assert SPEC is not None and SPEC.loader is not None
vocabulary: Any = importlib.util.module_from_spec(SPEC)
sys.modules["vocabulary"] = vocabulary
SPEC.loader.exec_module(vocabulary)
NUM = 3


def costs(num_ranks: int) -> Costs:
    return replace(Costs.even(num_ranks), spread=SpreadCosts({"S": 1.0, "T": 1.0}, {"hidden": 3.0, "part": 30.0}))


def test_the_last_rank_sends_and_gets_one_hidden_state_and_the_others_pass_slices_on() -> None:
    found = vocabulary.relayed(SPREAD_ORDERS["1f1b"](4, NUM, 1), costs(4), Network.even(4, rate=100.0, delay_s=0.01))
    expected = {(3, to): 1.0 for to in range(3)} | {(rank, 3): 10.0 for rank in range(3)}
    expected |= {(rank, to): 11.0 for rank in range(3) for to in range(3) if rank != to}
    carried = {pair: num_bytes for pair, num_bytes in found.link_bytes.items() if num_bytes}
    assert carried == {pair: NUM * num_bytes for pair, num_bytes in expected.items()}


def test_two_ranks_have_nobody_to_pass_slices_on_to() -> None:
    plan, links = SPREAD_ORDERS["1f1b"](2, NUM, 2), Network.even(2, rate=10.0, delay_s=0.01)
    assert vocabulary.relayed(plan, costs(2), links).spans == simulate(plan, costs(2), links).spans
