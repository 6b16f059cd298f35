"""Where a budget leaves a choice, a run takes what is soonest at the rates of its disk, alike on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.workers import run_workers
from thinwire.calibration.process import USUAL
from thinwire.device import Device
from thinwire.methods.memory import LENT_RATE, Residency, StepRates
from thinwire.models.build import build_skeleton
from thinwire.run import residency as run_residency
from thinwire.run.config import TrainConfig
from thinwire.run.residency import resolved
from thinwire.run.run import Run
from thinwire.tiers.probe import disk_rates
from thinwire.training import soonest

# With all activations kept states move 2 MB in a step, and with layers computed again nothing.
BETWEEN = "660mb"
KEPT, AGAIN = ("memory", "memory", "keep"), ("memory", "memory", "recompute")


def chosen_with(rank: int, world_size: int, rates: list[float], lent: str) -> tuple[tuple[str, ...], list[str]]:
    """What a rank whose disk has this rate chooses, and why."""
    config = TrainConfig(
        model="tiny", workers=2, local_size=1, micro_batch=2, memory=BETWEEN, store="/var/tmp", dtype="fp32"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_residency, "process_memory", lambda: USUAL)
        patch.setattr(soonest, "step_flops", lambda *_: 20e9)
        if rates:
            patch.setattr(soonest, "disk_rates", lambda _: (rates[rank], rates[rank]))
        if lent:
            patch.setenv(LENT_RATE, lent)
        run = Run.of(config)
        found = soonest.chosen(run, Device(), "fp32", *resolved(run, build_skeleton("tiny", 256, 256)))
    assert found.flops == 20e9
    return soonest.key_of(found.residency), [why for _, _, why in found.rows]


def chosen_each(rank: int, world_size: int) -> list[tuple[tuple[str, ...], list[str]]]:
    cases = [([5e9, 5e9], ""), ([5e9, 1e6], ""), ([5e9, 5e9], "1MB/s"), ([], "")]
    return [chosen_with(rank, world_size, *case) for case in cases]


def test_the_slowest_disk_decides_for_all_ranks() -> None:
    first, second = run_workers(chosen_each, 2)
    assert first == second
    (fast, (how,)), (slow, (slow_how,)), (stated, (stated_how,)), (_, (measured_how,)) = first
    assert fast == KEPT and "the disk reads 5 GB/s and writes 5 GB/s, measured now" in how
    assert slow == AGAIN and "reads 1 MB/s and writes 1 MB/s, measured now" in slow_how
    assert stated == AGAIN and "writes 1 MB/s, as stated" in stated_how
    # A rate such as 1.25 GB/s ends as the one above.
    assert "measured now" in measured_how and "reads 5 GB/s" not in measured_how


@pytest.mark.parametrize(
    ("each", "words"),
    [
        ((2.0, 2.0, 2.0), "takes about 2 s a step, and as long with every other choice: the disk reads 5 MB/s"),
        ((2.0, 3.0, 3.0), "takes about 2 s a step, and 3 s with other choices: "),
        ((2.0, 3.0, 4.0), "takes about 2 s a step, and 3 s to 4 s with other choices: "),
    ],
)
def test_other_choices_are_told_where_they_differ(
    each: tuple[float, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [Residency(memory="2gb", activations=kind) for kind in ("keep", "recompute", "offload")]
    monkeypatch.setattr(soonest, "seconds", lambda way, *_: (each[ways.index(way)], 0.0, 0.0))
    rates = StepRates(tokens=1, flops=1e9, read=5e6, written=5e6)
    assert words in soonest.row_on(ways[0], ways, cast(Any, None), rates, "measured now")[2]


def test_a_rate_of_the_disk_is_measured_past_the_page_cache(tmp_path: Path) -> None:
    read, written = disk_rates(Path("/var/tmp"))
    assert 1e5 < read < 1e11 and 1e5 < written < 1e11
