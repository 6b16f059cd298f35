"""`--mesh data=2,tensor=2` on the command line: as without a tensor axis, and checkpoints move between the two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.commands import check_refused, train_ranks
from thinwire.errors import ConfigError, Problems
from thinwire.planner.explain import explain
from thinwire.planner.options import read_explain

SAVED, STEPS = 3, 6
SMALL = (
    "--model", "tiny", "--seq-len", "16", "--micro-batch", "2", "--tokens-per-step", "128", "--lr", "0.003",
    "--dtype", "fp32", "--eval-sequences", "8", "--sample-tokens", "8", "--timeout", "120", "--steps", str(STEPS),
)  # fmt: skip
MESH = ("--mesh", "data=2,tensor=2")
FP32 = tuple(f"--frontier.{option}=fp32" for option in ("weights", "intra-gradients", "inter-gradients", "refresh"))
DILOCO = ("--strategy", "diloco", "--diloco.sync-every", "2", "--inner", "zero")


def train(folder: Path, name: str, num_ranks: int, *flags: str, origin: str = "") -> dict[str, Any]:
    """See train_ranks; with losses and norms by step."""
    place = () if "diloco" in flags else ("--local-size", "1")
    run = train_ranks(folder, name, num_ranks, [*SMALL, *flags, *place], origin)
    return run | {"by_step": {step: (line["loss"], line["grad_norm"]) for step, line in run["steps"].items()}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    folder, stop = tmp_path_factory.mktemp("mesh"), ("--stop-at", str(SAVED))
    yield {
        "alone": train(folder, "alone", 2, "--strategy", "zero"),
        "mesh": train(folder, "mesh", 4, "--strategy", "zero", *MESH, *stop),
        "on": train(folder, "on", 4, "--strategy", "zero", *MESH, origin="mesh"),
        "off": train(folder, "off", 2, "--strategy", "zero", "--mesh", "data=2", origin="mesh"),
        "ddp": train(folder, "ddp", 4, "--strategy", "ddp", *MESH, *stop),
        "sdp4bit": train(folder, "sdp4bit", 4, "--strategy", "sdp4bit", *MESH, *stop),
        "lossy": train(folder, "lossy", 4, "--strategy", "sdp4bit", *MESH, origin="sdp4bit"),
        "plain": train(folder, "plain", 2, "--strategy", "zero-compressed", "--mesh", "data=2", *stop),
        "cut": train(folder, "cut", 4, "--strategy", "zero-compressed", *MESH, "--stop-at", "4", origin="plain"),
        "uncut": train(folder, "uncut", 2, "--strategy", "zero-compressed", "--mesh", "data=2", origin="cut"),
        "frontier": train(folder, "frontier", 4, "--strategy", "frontier", *FP32, *MESH),
        "fsdp": train(folder, "fsdp", 4, "--strategy", "fsdp", *MESH),
        "islands": train(folder, "islands", 2, *DILOCO, "--mesh", "island=2,data=1"),
        "island-tensor": train(folder, "island-tensor", 4, *DILOCO, "--mesh", "island=2,tensor=2"),
    }


def test_a_tensor_axis_changes_no_loss_and_no_norm(runs: dict[str, dict[str, Any]]) -> None:
    for name in ("mesh", "ddp", "fsdp", "frontier"):
        for step, found in runs[name]["by_step"].items():
            assert found == pytest.approx(runs["alone"]["by_step"][step], rel=1e-5), (name, step)
    assert "mesh: data=2,tensor=2" in runs["mesh"]["printed"]
    assert runs["mesh"]["world_size"] == 4


def test_checkpoints_move_between_meshes(runs: dict[str, dict[str, Any]]) -> None:
    for name in ("on", "off"):
        assert "resume proven" in runs[name]["printed"]
        for step in range(SAVED + 1, STEPS + 1):
            assert runs[name]["by_step"][step] == pytest.approx(runs["alone"]["by_step"][step], rel=1e-5), (name, step)
        assert runs[name]["heldout_loss"] == pytest.approx(runs["alone"]["heldout_loss"], rel=1e-5)
    # On the same mesh everything is as it was saved, with what the method remembers.
    for name in ("on", "lossy"):
        assert "resume: found all of it" in runs[name]["printed"]


def test_error_feedback_moves_with_the_matrices(runs: dict[str, dict[str, Any]]) -> None:
    for name in ("cut", "uncut"):
        assert "resume proven" in runs[name]["printed"]
        assert re.search(r"error feedback of gradients, of \d rank\(s\): transformed", runs[name]["printed"])


def test_islands_may_be_cut(runs: dict[str, dict[str, Any]]) -> None:
    for step, found in runs["island-tensor"]["by_step"].items():
        assert found == pytest.approx(runs["islands"]["by_step"][step], rel=1e-5), step
    assert "2 island(s) of 2 rank(s)" in runs["island-tensor"]["printed"]
    assert runs["island-tensor"]["heldout_loss"] == pytest.approx(runs["islands"]["heldout_loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["mesh", "ddp", "sdp4bit", "fsdp"])
def test_explain_knows_the_bytes_of_a_mesh(name: str, runs: dict[str, dict[str, Any]]) -> None:
    strategy, problems = {"mesh": "zero"}.get(name, name), Problems()
    flags = ["--model", "tiny", "--seq-len", "16", "--nodes", "4", "--local-size", "1", *MESH, "--strategy", strategy]
    found = explain(read_explain(flags, problems), problems)
    assert sum(found.plans[strategy].sent.values()) == runs[name]["sent_bytes_per_step"]
    assert any(asked == "tensor axis of 2 ranks" for asked, _, _ in found.notes)
    with pytest.raises(ConfigError, match="one-byte can't share a mesh with a tensor axis: it draws"):
        explain(read_explain([*flags[:-1], "one-byte"], problems), problems)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mesh", "data=2,tensor=3"), r"--mesh data=2,tensor=3 has 6 ranks and the run has 4: .*nearest: --mesh"),
        (("--mesh", "data=2,tensr=2"), "did you mean 'tensor'"),
        (("--mesh", "data=two"), "must be AXIS=RANKS"),
        (("--mesh", "data=2,expert=2"), "nearest: a mixture such as moe-demo"),
        ((*MESH, "--strategy", "one-byte"), "one-byte can't share a mesh with a tensor axis: it draws"),
        ((*MESH, *DILOCO), "has no island axis; nearest: --mesh island=1,data=2,tensor=2"),
        (("--mesh", "island=2,data=2"), "strategy sdp4bit has no islands; nearest: --strategy diloco --inner sdp4bit"),
        (("--mesh", "island=2,data=2", *DILOCO, "--local-size", "4"), "of --mesh island=2,data=2 has 2 ranks"),
        (("--mesh", "data=1,tensor=4"), "can't cut num_key_value_heads 2"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_a_process_starts(
    tmp_path: Path, flags: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused(tmp_path, ["--workers", "4", *SMALL, *flags], message, monkeypatch)
