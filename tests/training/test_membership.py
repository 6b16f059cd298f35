"""A worker of an island dies: the other island goes on, and the launcher starts the first one again, which joins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.training.commands import Runner, children, finish, is_running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]


def test_an_island_that_died_comes_back(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    # The second rank of island 1 dies; island 0 stands still for a while, so that the other finds it when it is back.
    faults = ["--inject", "kill island=1 rank=1 step=10", "--inject", "delay island=0 step=20 seconds=12"]
    flags = runner.flags(
        "run", workers=4, local_size=2, strategy="streaming-diloco", inner="sdp4bit", steps=60, timeout=20,
        **{"streamingdiloco.sync-every": 6, "streamingdiloco.num-fragments": 2},
    )  # fmt: skip
    process = runner.start(sys.executable, "-m", "thinwire", "train", *flags, *faults)
    try:
        runner.await_steps("run/island-1", process, 4)
        first = descendants(process.pid)
        code, out, err = finish(process)
    finally:
        runner.close()
    assert code == 0, err
    assert "island 1 is started again (1 of 3)" in err
    assert "island 1 is lost" in out and "island 1 joins" in out
    changes = [[line for line in runner.metrics(name) if "event" in line] for name in ("run", "run/island-1")]
    assert changes[0][0]["lost"] == [1] and changes[0][-1]["members"] == [0, 1]
    assert [line["joined"] for line in changes[1]] == [[1]] and changes[1][0]["cost_s"] >= 0
    steps = [[line["step"] for line in runner.metrics(name) if "step" in line] for name in ("run", "run/island-1")]
    assert steps[0] == list(range(1, 61)) and steps[1][-1] == 60 and len(steps[1]) < 60, "it has missed some"
    losses = [line["loss"] for line in runner.metrics("run") if "loss" in line]
    assert losses[-1] < losses[0]
    ends = [runner.summary(name)["heldout_loss"] for name in ("run", "run/island-1")]
    assert ends[0] == ends[1], "the outer parameters have the same bits on both"
    assert not any(map(is_running, first)) and not descendants(process.pid)
