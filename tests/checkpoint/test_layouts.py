"""Saved under any layout, loaded under any other: the same tensors bit for bit, and the same future."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.replicas import STRATEGIES, Replica, atoms
from tests.workers import run_workers
from thinwire.checkpoint import Source

STEPS = 3
# Between kinds of host, and with and without a memory.
CROSSINGS = [
    ("zero", "ddp"), ("ddp", "fsdp"), ("fsdp", "zero"), ("sdp4bit", "zero"), ("zero", "sdp4bit"),
    ("powersgd", "zero-compressed"), ("zero-compressed", "two-way"), ("ef-topk", "powersgd"), ("zeropp", "sdp4bit"),
    ("sdp4bit", "zeropp"), ("frontier", "zero"), ("ddp", "frontier"), ("ddp", "onebit-adam"),
    ("zero-dion", "fsdp-dion"), ("fsdp-dion", "ddp-dion"), ("ddp-dion", "zero-dion"),
]  # fmt: skip
# By whom, on any ranks, the second loss after must be what it would have been, too.
FOLLOWED = ("zero", "ddp", "fsdp")
# (from, to) by whom the first loss after must be the one before: codecs leave their weights alone.
EXACT = {
    "zero",
    "ddp",
    "fsdp",
    "powersgd",
    "two-way",
    "ef-topk",
    "dgc",
    "onebit-adam",
    "zero-dion",
    "fsdp-dion",
    "ddp-dion",
}


def first_run(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Train, save, go on; then a fresh replica of the same layout loads, and goes on."""
    told: dict[str, Any] = {}
    for name in STRATEGIES:
        first = Replica.make(name, rank, world_size, seed=0, local_size=2)
        for step in range(STEPS):
            first.step(step)
        first.save(folder / name / "4", STEPS)
        residuals = first.residuals()
        losses = [first.step(STEPS), first.step(STEPS + 1)]
        again = Replica.make(name, rank, world_size, seed=9, local_size=2)
        source = again.load(folder / name / "4" / "step-00000003")
        told[name] = losses, [again.step(STEPS), again.step(STEPS + 1)], residuals, source.report()
    return told


def later_run(
    rank: int, world_size: int, folder: Path, pairs: list[tuple[str, str, str]], local_size: int
) -> dict[str, Any]:
    """Each pair: load what the first strategy saved in a world, save it anew under the second, and go on."""
    told: dict[str, Any] = {}
    for before, world, name in pairs:
        replica = Replica.make(name, rank, world_size, seed=9, local_size=local_size)
        source = replica.load(folder / before / world / "step-00000003")
        residuals = replica.residuals()
        replica.save(folder / f"{before}-{name}" / f"{world}-{world_size}", STEPS)
        told[f"{before}-{name}"] = (
            [replica.step(STEPS + more) for more in range(1 + (name in FOLLOWED))],
            source.is_exact,
            residuals,
            source.report(),
        )
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def origin(folder: Path) -> list[dict[str, Any]]:
    return run_workers(first_run, 4, folder)


def mean_owed(told: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([rank[name] for rank in told]).mean(0) for name in told[0]}


def test_the_same_layout_goes_on_bit_for_bit(origin: list[dict[str, Any]]) -> None:
    for name in STRATEGIES:
        uninterrupted, resumed, _, report = origin[0][name]
        assert resumed == uninterrupted, name
        assert report == [("resume", "found all of it", "the same layout: all as it was saved")]


@pytest.mark.parametrize(
    ("world_size", "local_size", "names"),
    [
        (3, 1, list(STRATEGIES)),
        (2, 2, ["zero", "fsdp", "powersgd", "frontier"]),
        (1, 1, ["sdp4bit", "ddp", "two-way"]),
        (8, 4, ["zero", "zero-compressed"]),
    ],
)
def test_another_world(
    origin: list[dict[str, Any]], folder: Path, world_size: int, local_size: int, names: list[str]
) -> None:
    pairs = [(name, "4", name) for name in names]
    told = run_workers(later_run, world_size, folder, pairs, local_size)
    for name in names:
        losses, is_exact, _, _ = told[0][f"{name}-{name}"]
        before, after = (
            atoms(folder / name / "4" / "step-00000003"),
            atoms(folder / f"{name}-{name}" / f"4-{world_size}" / "step-00000003"),
        )
        assert before.keys() - after.keys() <= {key for key in before if key.startswith("replica/")}
        assert all(torch.equal(before[key], after[key]) for key in after), name
        assert before["weights/embed.weight"].numel() == 1024 and before["weights/five"].numel() == 5
        assert is_exact or name not in EXACT
        assert losses[0] == pytest.approx(origin[0][name][0][0], rel=1e-5 if is_exact else 2e-2), name
        if name in FOLLOWED:
            assert losses[1] == pytest.approx(origin[0][name][0][1], rel=1e-5), name
        if world_size == 1:
            continue
        owed_before = mean_owed([rank[name][2] for rank in origin])
        owed_after = mean_owed([rank[f"{name}-{name}"][2] for rank in told])
        for key, value in owed_before.items():
            torch.testing.assert_close(owed_after[key], value, rtol=1e-5, atol=1e-7, msg=f"{name} {key}")
        assert not owed_before or any(float(value.abs().max()) > 0 for value in owed_before.values())


def test_another_strategy(origin: list[dict[str, Any]], folder: Path) -> None:
    pairs = [(before, "4", name) for before, name in CROSSINGS]
    told = run_workers(later_run, 2, folder, pairs, 1)
    for before, name in CROSSINGS:
        losses, is_exact, _, report = told[0][f"{before}-{name}"]
        saved, again = (
            atoms(folder / before / "4" / "step-00000003"),
            atoms(folder / f"{before}-{name}" / "4-2" / "step-00000003"),
        )
        shared = [key for key in saved if key.startswith(("weights/", "optimizer/"))]
        assert all(torch.equal(saved[key], again[key]) for key in shared), (before, name)
        assert Source(folder / f"{before}-{name}" / "4-2" / "step-00000003", 0).scalar("step", "five") == STEPS
        assert is_exact or not {before, name} <= EXACT
        assert losses[0] == pytest.approx(origin[0][before][0][0], rel=1e-5 if is_exact else 2e-2), (before, name)
        became = {line[0]: line[1] for line in report}
        assert became["resume: weights"] == "carried"
    became = {line[0]: line[1] for line in told[0]["powersgd-zero-compressed"][3]}
    assert became["resume: error feedback of gradients, of 4 rank(s)"] == "transformed"
    for line, pair in (("replicas that differ from the masters", "sdp4bit-zero"),):
        assert {row[0]: row[1] for row in told[0][pair][3]}[f"resume: {line}"] == "dropped"
    (why,) = [row[2] for row in told[0]["zeropp-sdp4bit"][3] if row[0].startswith("resume: wires")]
    assert why.startswith("LoCo's errors are moving averages")
    rebuilt = {row[0]: row[1] for row in told[0]["zero-sdp4bit"][3]}
    assert rebuilt["resume: replicas that weight differences refer to"] == "transformed"
    for before, name in (("powersgd", "zero-compressed"), ("zero-compressed", "two-way"), ("ef-topk", "powersgd")):
        owed_before = mean_owed([rank[before][2] for rank in origin])
        owed_after = mean_owed([rank[f"{before}-{name}"][2] for rank in told])
        for key in owed_before.keys() & owed_after.keys():
            torch.testing.assert_close(owed_after[key], owed_before[key], rtol=1e-5, atol=1e-7, msg=f"{name} {key}")
