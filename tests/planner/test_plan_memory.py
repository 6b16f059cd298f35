"""What a plan counts as memory, and what it chooses under a limit."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.planner.machines import FAST, RATES, machine, planned, priced_of, small
from thinwire.errors import ConfigError
from thinwire.planner.candidates import candidates
from thinwire.planner.memory import Offset
from thinwire.planner.plan import least_bytes, plan
from thinwire.planner.prices import price_one
from thinwire.planner.training_plan import TrainingPlan

pytestmark = pytest.mark.usefixtures("few")


def test_under_a_limit_the_fastest_of_those_that_fit_is_found() -> None:
    """Whatever closed forms find faster and does not fit; all ways are priced here to compare."""
    tables: dict[str, dict[str, Any]] = {"llama": {"num_hidden_layers": 4}}

    def within(memory_bytes: float | None) -> TrainingPlan:
        return plan(
            "tiny", machine(10 * FAST), tokens_per_step=2048, micro_batch=8, strategies=("zero",), axes=(),
            tables=tables, memory_bytes=memory_bytes,
        )  # fmt: skip

    prices = priced_of(within(None), candidates(4, 4, 8, ("zero",), {}, 8))
    limits = sorted({each.memory_bytes for each in prices})
    for tenths in (0, 3, 4):
        limit = limits[tenths * max(1, len(limits) // 10)]
        best = min(each.step_s for each in prices if each.memory_bytes <= limit)
        found = within(limit).best
        assert found.memory_bytes <= limit and found.step_s <= 1.05 * best


def test_what_does_not_fit_is_not_chosen() -> None:
    free = planned(machine(FAST), strategies=("zero", "ddp"))
    least = min(priced.memory_bytes for priced in free.search.fastest)
    small = planned(machine(FAST), strategies=("zero", "ddp"), memory_bytes=1.01 * least)
    assert small.search.too_large and all(priced.memory_bytes <= 1.01 * least for priced in small.search.fastest)
    for memory_bytes in (1e6, 5e5):
        # Nothing else is told: no other number that is not the user's, and no mesh that the model has no layers for.
        with pytest.raises(ConfigError, match=r"no way to train fits; the least is [\d.]+ [MG]B[^\n]*$"):
            planned(machine(FAST), memory_bytes=memory_bytes, strategies=("zero", "ddp"), residency={"store": "none"})
    for nothing in (0.0, -5.0, math.nan):
        with pytest.raises(ConfigError, match=f"memory_bytes {nothing:g}: must be above 0"):
            planned(machine(FAST), memory_bytes=nothing)
    with pytest.raises(ConfigError, match="nearest: 8192"):
        plan("demo", machine(FAST), tokens_per_step=8000)
    lacking = replace(machine(FAST), rates={"layer 512 fp32": 1e9, "copy": 1e9})
    with pytest.raises(ConfigError, match="'encode fp32' was not measured; nearest: thinwire calibrate --codecs fp32"):
        planned(lacking)
    # Nothing is told of disks, which would not help, nor of meshes that no model of three layers has.
    bare = replace(machine(FAST), rates={})
    with pytest.raises(ConfigError, match=r"^layers in fp32 were not measured [^\n]*$"):
        planned(bare, tables={"llama": {"num_hidden_layers": 3}}, memory_bytes=8e9)
    with pytest.raises(ConfigError, match=r"^layers in bf16 were not measured [^\n]*, with --dtypes fp32 bf16$"):
        planned(lacking, dtype="bf16", memory_bytes=8e9)


def test_memory_counts_the_loss_and_the_type_that_the_run_takes() -> None:
    made = replace(machine(FAST), rates={**RATES, "layer 64 bf16": 4e9, "launch 64 bf16": 1e4})

    def memory_bytes(**more: Any) -> float:
        found = plan(
            "tiny", made, tokens_per_step=8192, strategies=("zero",), stages=1, axes=(),
            **{"vocab_size": 40_000, **more},
        )  # fmt: skip
        return next(each.memory_bytes for each in found.search.fastest if each.candidate.micro_batch == 8)

    logits = 4 * 8 * 256 * 40_000
    by_loss = {loss: memory_bytes(loss=loss) for loss in ("auto", "cut", "plain")}
    assert by_loss["auto"] == by_loss["cut"] < by_loss["plain"] - 1.4 * logits
    small = {"vocab_size": 257, "seq_len": 64}
    assert memory_bytes(**small, dtype="bf16") < 0.95 * memory_bytes(**small)
    with pytest.raises(ConfigError, match=r"(?s)dtype 'fp16': no such choice.*'bf16'.*loss 'cutt': .* mean 'cut'"):
        memory_bytes(loss="cutt", dtype="fp16")


def test_a_part_lies_on_a_disk_only_where_nothing_fits_in_memory() -> None:
    made = replace(machine(FAST), disk=(1e8, 1e9), base_bytes=400e6)
    # Three times what is counted: nothing fits into 700 MB as it is.
    counted: dict[str, Any] = {"stages": 1, "estimator": Offset(3.0)}
    small = planned(made, strategies=("zero", "ddp"), memory_bytes=700e6, **counted)
    assert (
        small.best.candidate.memory == "700mb" == small.values["memory"]
        and "--memory 700mb" in small.best.candidate.flags
    )
    assert small.best.memory_bytes <= 700e6 and any("ddp keeps all" in reason for reason in small.search.refused)
    assert small.best.terms["peak_rss_bytes"] == small.best.memory_bytes
    # A process that holds more before it has a model has less room for it, on a disk or not.
    heavy = planned(replace(made, base_bytes=500e6), strategies=("zero",), memory_bytes=700e6, **counted).search
    (why,) = (why for why, ways in heavy.refused.items() if small.best.candidate in ways)
    assert "below the floor of 716 MB: process 500 MB" in why
    assert all(each.memory_bytes <= 700e6 for each in heavy.fastest)
    with pytest.raises(ConfigError, match="no way to train fits; the least is"):
        planned(replace(made, base_bytes=690e6), strategies=("zero",), memory_bytes=700e6, **counted)
    # The least that is named suffices, in memory and with a disk, and no other floor is told.
    for base in (300e6, 500e6, 560e6):
        short = replace(made, base_bytes=base)
        with pytest.raises(ConfigError, match=r"no way to train fits; the least is \d+ MB") as caught:
            planned(short, strategies=("zero",), memory_bytes=310e6, **counted)
        least = re.findall(r"(?:least is|floor of|--memory) (\d+)", str(caught.value))
        assert len(least) == 1
        assert planned(short, strategies=("zero",), memory_bytes=1e6 * int(least[0]), **counted).search.fastest
    free = planned(made, strategies=("zero",), memory_bytes=1e12, **counted)
    assert not free.best.candidate.memory and free.best.step_s < small.best.step_s
    # One message: the least, how to get there, and what would let less do.
    told = r"^memory of 100 MB .*; the least is 191 MB; nearest: 191mb, or less with a part on a disk: the disk was not"
    with pytest.raises(ConfigError, match=told + r" measured; nearest: thinwire calibrate --disk FOLDER$"):
        planned(machine(FAST), strategies=("zero",), memory_bytes=100e6, stages=1)


def test_the_place_of_activations_is_that_of_a_run_on_this_disk() -> None:
    """A slow disk is worth less than computing layers again, which moves nothing under this budget."""
    took: list[float] = []
    for rate in (1e12, 1e6):
        found = small(replace(machine(FAST, num_ranks=2), disk=(rate, rate)), strategies=("zero",), stages=1, axes=())
        way = found.search.fastest[0]
        took.append(price_one(found.pricing, replace(way.candidate, memory="660mb")).step_s / way.step_s)
    assert took[0] == pytest.approx(1.0, abs=1e-4) and 1.2 < took[1] < 4 / 3 + 1e-6


def test_the_least_memory_is_searched_within_bounds() -> None:
    assert 700e6 <= least_bytes(lambda limit: limit >= 700e6, 690e6, 100e6) <= 1.01 * 700e6
    # No memory helps: the guess stands.
    assert least_bytes(lambda limit: False, 690e6, 100e6) == 690e6
