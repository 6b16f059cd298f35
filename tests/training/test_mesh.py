"""`--mesh data=2,tensor=2` on the command line: as without a tensor axis, and checkpoints move between the two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.commands import RunsOfRanks, check_refused
from thinwire.errors import ConfigError, Problems
from thinwire.planner.explain import explain
from thinwire.planner.options import read_explain

SAVED, STEPS = 2, 4
SMALL = (
    "--model", "tiny", "--seq-len", "16", "--micro-batch", "2", "--tokens-per-step", "128", "--lr", "0.003",
    "--dtype", "fp32", "--eval-sequences", "8", "--sample-tokens", "2", "--timeout", "120", "--steps", str(STEPS),
)  # fmt: skip
MESH = ("--mesh", "data=2,tensor=2")
CUT = "--mesh data=2,tensor=2 --local-size 2"
WHOLE = "--mesh data=2 --local-size 1"
STOP = f"--stop-at {SAVED}"
FP32 = " ".join(f"--frontier.{option}=fp32" for option in ("weights", "intra-gradients", "inter-gradients", "refresh"))
EXACT = "--pipeline.forward fp32 --pipeline.backward fp32"
DILOCO = "--strategy diloco --diloco.sync-every 2 --inner zero"
ROWS = {
    "alone": (2, "--strategy zero --local-size 1", ""),
    "mesh": (4, f"--strategy zero {CUT} {STOP}", ""),
    "on": (4, f"--strategy zero {CUT}", "mesh"),
    # Axes of 1 rank are none.
    "off": (2, f"--strategy zero {WHOLE.replace(' --l', ',expert=1,sequence=1,pipeline=1,island=1 --l')}", "mesh"),
    "ddp": (4, f"--strategy ddp {CUT} {STOP}", ""),
    "sdp4bit": (4, f"--strategy sdp4bit {CUT} {STOP}", ""),
    "lossy": (4, f"--strategy sdp4bit {CUT}", "sdp4bit"),
    "plain": (2, f"--strategy zero-compressed {WHOLE} {STOP}", ""),
    "cut": (4, f"--strategy zero-compressed {CUT} --stop-at {SAVED + 1}", "plain"),
    "uncut": (2, f"--strategy zero-compressed {WHOLE}", "cut"),
    "frontier": (4, f"--strategy frontier {FP32} {CUT}", ""),
    "fsdp": (4, f"--strategy fsdp {CUT}", ""),
    "islands": (2, f"{DILOCO} --mesh island=2,data=1", ""),
    "island-tensor": (4, f"{DILOCO} --mesh island=2,tensor=2", ""),
    "island-stages": (4, f"{DILOCO} --stages 2 {EXACT}", ""),
    "apart": (2, f"--strategy diloco --diloco.sync-every 50 --inner zero --mesh island=2,data=1 {STOP}", ""),
    "left-whole": (1, "--strategy zero --mesh data=1 --local-size 1", "apart"),
    "left-stages": (2, f"--strategy zero --mesh pipeline=2 --local-size 1 {EXACT}", "apart"),
    "left-rows": (2, f"--strategy zero --mesh pipeline=2 --local-size 1 {EXACT} --pipeline.head spread", "apart"),
    "left-tensor": (2, "--strategy zero --mesh tensor=2 --local-size 2", "apart"),
}


def by_step(run: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """Loss and norm of each step."""
    return {step: (line["loss"], line["grad_norm"]) for step, line in run["steps"].items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunsOfRanks:
    return RunsOfRanks(tmp_path_factory.mktemp("mesh"), ROWS, SMALL)


# What tests/hosts/test_tensor.py shows of each strategy.
COVERED = [pytest.param(name, marks=pytest.mark.whole) for name in ("ddp", "fsdp", "frontier")]


@pytest.mark.parametrize("name", ["mesh", *COVERED])
def test_a_tensor_axis_changes_no_loss_and_no_norm(name: str, runs: RunsOfRanks) -> None:
    for step, found in by_step(runs[name]).items():
        assert found == pytest.approx(by_step(runs["alone"])[step], rel=1e-5), step
    printed = runs[name]["printed"]
    assert "mesh: data=2,tensor=2" in printed and "whole mesh: 2 node(s) x 2 rank(s)" in printed
    assert "ranks of a tensor axis send each other, a step: about" in printed
    assert "bytes, without those of the tensor axis, which torch sends" in printed
    assert runs[name]["world_size"] == 4


def test_checkpoints_move_between_meshes(runs: RunsOfRanks) -> None:
    for name in ("on", "off"):
        assert "resume proven" in runs[name]["printed"]
        for step in range(SAVED + 1, STEPS + 1):
            assert by_step(runs[name])[step] == pytest.approx(by_step(runs["alone"])[step], rel=1e-5), (name, step)
        assert runs[name]["heldout_loss"] == pytest.approx(runs["alone"]["heldout_loss"], rel=1e-5)
    # On the same mesh everything is as it was saved, with what the method remembers.
    for name in ("on", "lossy"):
        assert "resume: found all of it" in runs[name]["printed"]


@pytest.mark.parametrize("name", ["cut", pytest.param("uncut", marks=pytest.mark.whole)])
def test_error_feedback_moves_with_the_matrices(name: str, runs: RunsOfRanks) -> None:
    assert "resume proven" in runs[name]["printed"]
    assert re.search(r"error feedback of gradients, of \d rank\(s\): transformed", runs[name]["printed"])


@pytest.mark.parametrize("name", ["island-tensor", "island-stages"])
def test_islands_may_be_cut(name: str, runs: RunsOfRanks) -> None:
    for step, found in by_step(runs[name]).items():
        assert found == pytest.approx(by_step(runs["islands"])[step], rel=1e-5), step
    assert "2 island(s) of 2 rank(s)" in runs[name]["printed"]
    assert runs[name]["heldout_loss"] == pytest.approx(runs["islands"]["heldout_loss"], rel=1e-5)
    assert runs[name]["sample"]


@pytest.mark.parametrize("name", ["left-stages", "left-rows", "left-tensor"])
def test_any_mesh_goes_on_from_the_mean_of_the_islands_weights(name: str, runs: RunsOfRanks) -> None:
    assert "weights of the islands: transformed (the mean of those of islands [0, 1])" in runs[name]["printed"]
    for step in range(SAVED + 1, STEPS + 1):
        assert by_step(runs[name])[step] == pytest.approx(by_step(runs["left-whole"])[step], rel=1e-5), step


@pytest.mark.parametrize("name", ["mesh", "sdp4bit", *COVERED[:2]])
def test_explain_knows_the_bytes_of_a_mesh(name: str, runs: RunsOfRanks) -> None:
    strategy, problems = {"mesh": "zero"}.get(name, name), Problems()
    flags = ["--model", "tiny", "--seq-len", "16", "--nodes", "2", *CUT.split(), "--strategy", strategy]
    found = explain(read_explain(flags, problems), problems)
    assert sum(found.plans[strategy].sent.values()) == runs[name]["sent_bytes_per_step"]
    assert any(asked == "tensor axis of 2 ranks" for asked, _, _ in found.notes)
    with pytest.raises(ConfigError, match="one-byte can't share a mesh with a tensor axis: it draws"):
        explain(read_explain([*flags[:-1], "one-byte"], problems), problems)


def test_explain_knows_what_cut_islands_exchange(runs: RunsOfRanks) -> None:
    flags = "--model tiny --seq-len 16 --nodes 2 --local-size 2 --strategy diloco --diloco.sync-every 2 --mesh"
    plans = []
    for mesh in ("island=2,data=1,tensor=2", "data=2,tensor=2", "data=4"):
        problems = Problems()
        plans.append(explain(read_explain([*flags.split(), mesh], problems), problems).plans["diloco"])
    assert plans[0] == plans[1]
    # Its first rank keeps what that of a whole island keeps.
    assert plans[0].other == plans[2].other
    steps = runs["island-tensor"]["steps"]
    exchanged = sum(num for (operation, _), num in plans[0].sent.items() if operation != "all_gather_exact")
    assert exchanged == -(-(steps[SAVED]["sent_bytes"] - steps[1]["sent_bytes"]) // 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--mesh", "data=2,tensor=3"),
            r"--mesh data=2,tensor=3 has 6 ranks and the run has 4: .*nearest: --workers 6",
        ),
        ((*MESH, "--local-size", "1"), "a tensor axis of 2 ranks would span nodes.*nearest: --local-size 2"),
        (("--mesh", "data=2,tensr=2"), "; nearest: tensor"),
        (("--mesh", "data=two"), "must be AXIS=RANKS"),
        (("--mesh", "data=2,expert=2"), "nearest: a mixture such as moe-demo"),
        ((*MESH, "--strategy", "one-byte"), "one-byte can't share a mesh with a tensor axis: it draws"),
        ((*MESH, *DILOCO.split()), "has no island axis; nearest: --mesh island=1,data=2,tensor=2"),
        (("--mesh", "island=2,data=2"), "strategy sdp4bit has no islands; nearest: --strategy diloco --inner sdp4bit"),
        (("--mesh", "island=2,data=2", *DILOCO.split(), "--local-size", "4"), "of --mesh island=2,data=2 has 2 ranks"),
        (("--mesh", "data=1,tensor=4"), "can't cut num_key_value_heads 2"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_a_process_starts(
    tmp_path: Path, flags: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused(tmp_path, ["--workers", "4", *SMALL, *flags], message, monkeypatch)
