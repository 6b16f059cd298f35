"""A pipeline whose stages are killed goes on: from neighbours, or from a checkpoint where these are gone too."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.commands import CommandRunner, finish, is_running, workers_of
from thinwire.checkpoint import latest, next_loss
from thinwire.checkpoint.folder import step_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
TIMEOUT = 30
# A hang lasts for so long, and half as long again, until the launcher ends it.
HANG_TIMEOUT = 10
CHECKPOINT_EVERY = 10


def rank_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/comm").read_text().split()[-1])


def events(runner: CommandRunner) -> list[dict[str, Any]]:
    return [line for line in runner.metrics("run") if "event" in line]


def are_stopped_behind_a_checkpoint(runner: CommandRunner, workers: list[int]) -> bool:
    """Stop the workers where the newest checkpoint knows the loss that follows it; else let them go on.

    No rank may be near the next checkpoint: survivors could finish it, and it would know no loss.
    """
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    newest = latest(runner.folder / "run" / "checkpoints")
    if newest is not None and next_loss(newest) is not None:
        step = next(line["step"] for line in reversed(runner.metrics("run")) if "loss" in line)
        if step <= step_of(newest) + CHECKPOINT_EVERY - 3:
            return True
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    return False


def test_a_pipeline_goes_on_without_the_stages_that_are_killed(tmp_path: Path) -> None:
    runner = CommandRunner(tmp_path)
    asked = ("kill stage=2 step=4", "kill rank=0 step=6")
    flags = runner.flags(
        "run", workers=4, stages=4, local_size=1, strategy="sdp4bit", steps=1_000_000, timeout=TIMEOUT,
        tokens_per_step=64, checkpoint_every=CHECKPOINT_EVERY, sample_tokens=0,
        **{"pipeline.recover": "average", "llama.num-hidden-layers": 4, "llama.tie-word-embeddings": "True"},
    )  # fmt: skip
    process = runner.start("train", *flags, *(word for text in asked for word in ("--inject", text)))

    try:
        runner.await_steps("run", process, 12)
        first, workers = events(runner), workers_of(process.pid)
        assert sorted(map(rank_of, workers)) == [0, 1, 2, 3]
        killed = [pid for pid in workers if rank_of(pid) in (1, 2)]
        runner.await_that(lambda: are_stopped_behind_a_checkpoint(runner, workers), process)
        for pid in workers:
            os.kill(pid, signal.SIGKILL if pid in killed else signal.SIGCONT)
        runner.await_that(lambda: not set(killed) & set(workers_of(process.pid)), process)
        last = next(line["step"] for line in reversed(runner.metrics("run")) if "loss" in line)
        runner.await_that(lambda: runner.metrics("run")[-1].get("step", 0) >= last + 3, process)
        workers += workers_of(process.pid)
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
    finally:
        runner.close()
    assert code == 143 and "Traceback" not in err, err
    assert not any(map(is_running, workers))
    for rank in (0, 1, 2):
        assert f"thinwire: rank {rank} (pid " in err
    assert err.count("was killed by SIGKILL, and is started again (1 of 3)") == 3
    assert err.count("was killed by SIGKILL, and is started again (2 of 3)") == 1
    assert [event["lost"] for event in first] == [[2], [0]]
    assert [event["after_step"] for event in first] == [3, 5]
    assert first[0]["cost_s"] < TIMEOUT / 2 + 10
    assert first[0]["how"] == "stage 2 is the average of 1 and 3" and first[1]["how"] == "stage 0 is a copy of 1"
    told = [(tmp_path / "run" / "logs" / f"rank{rank}.log").read_text().splitlines() for rank in range(4)]
    losses = [line for lines in told for line in [line for line in lines if "is missing" in line][:1]]
    assert losses and not any("Timed out" in line for line in losses), "a closed connection tells at once"
    assert "generation 2: stage 2 is lost; stage 2 joins; stages 0, 1, 2, 3 go on after step 3" in out
    assert re.search(r"go on after step 3; rank 0 waited \d+\.\d s from when it missed the other \(stage 2 is", out)
    assert "stages 1 and 2 were lost together, and each is the other's neighbour: the run goes on from the" in out
    assert "a relative difference of 0\n" in out, "the checkpoint's next loss"
    lines = [line for line in runner.metrics("run") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, lines[-1]["step"] + 1))
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert runner.summary("run")["stopped"] == "SIGTERM"


def test_a_replica_that_is_killed_or_hangs_is_a_copy_of_the_other(tmp_path: Path) -> None:
    runner = CommandRunner(tmp_path)
    flags = runner.flags(
        "run", workers=6, stages=3, local_size=1, strategy="sdp4bit", steps=1_000_000, timeout=HANG_TIMEOUT,
        tokens_per_step=96, checkpoint_every=0, sample_tokens=0, **{"pipeline.recover": "average"},
    )  # fmt: skip
    # The other replica of its stage has taken the update, and waits for this one's part of the weights. Rank 0 has
    # taken it too, and waits for rank 1's: it can't write the line of the step before it learns of the loss.
    asked = ["kill rank=2 step=2 operation=weights", "delay rank=1 step=2 operation=weights seconds=2"]
    # All have taken the update, and the process that writes lines is gone before it has written this one.
    asked += ["kill rank=0 step=4 operation=weights"]

    def losses() -> list[dict[str, Any]]:
        # On a busy machine all may meet again because a message took too long.
        return [event for event in events(runner) if event["lost"]]

    process = runner.start("train", *flags, *(word for text in asked for word in ("--inject", text)))
    try:
        runner.await_that(lambda: (lines := runner.metrics("run")) != [] and lines[-1].get("step", 0) >= 6, process)
        (frozen,) = [pid for pid in workers_of(process.pid) if rank_of(pid) == 3]
        os.kill(frozen, signal.SIGSTOP)
        runner.await_that(lambda: len(losses()) == 3 and "loss" in runner.metrics("run")[-1], process)
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process)
    finally:
        runner.close()
    assert code == 143 and not is_running(frozen), err
    assert f"rank 3 (pid {frozen}) has hung, and is ended" in err
    assert f"rank 3 (pid {frozen}) was killed by SIGKILL, and is started again (1 of 3)" in err
    assert err.count("is started again") == 3, "those that waited for it are left alone"
    killed, first, hung = losses()
    assert killed["how"] == "replica 0 of stage 1 is a copy of replica 1" and killed["after_step"] == 2
    assert first["how"] == "replica 0 of stage 0 is a copy of replica 1" and first["after_step"] == 4
    assert hung["how"] == "replica 1 of stage 1 is a copy of replica 0" and hung["lost"] == [1]
    rows = [line for line in runner.metrics("run") if "loss" in line]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "each step's line once"
    # A hang breaks off a step that some have taken, or none.
    unmeasured = [row["step"] for row in rows if row["step_s"] is None and row["step"] <= 5]
    assert unmeasured == [2, 4] and rows[1]["sent_bytes"] is None
    assert all(math.isfinite(row[key]) for row in rows for key in ("loss", "tokens", "lr", "grad_norm"))
    assert runner.summary("run")["step_s"] > 0
