"""A pipeline whose stages are killed goes on: from neighbours, or from a checkpoint where these are gone too."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.commands import CommandRunner, finish, is_running, workers_of
from tests.workers import HANG_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
TIMEOUT = 30


def rank_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/comm").read_text().split()[-1])


def test_a_pipeline_goes_on_without_the_stages_that_are_killed(tmp_path: Path) -> None:
    runner = CommandRunner(tmp_path)
    asked = ("kill stage=2 step=4", "kill rank=0 step=6")
    flags = runner.flags(
        "run", workers=4, stages=4, local_size=1, strategy="sdp4bit", steps=1_000_000, timeout=TIMEOUT,
        tokens_per_step=64, checkpoint_every=3, sample_tokens=0,
        **{"pipeline.recover": "average", "llama.num-hidden-layers": 4, "llama.tie-word-embeddings": "True"},
    )  # fmt: skip
    process = runner.start("train", *flags, *(word for text in asked for word in ("--inject", text)))

    def events() -> list[dict[str, Any]]:
        return [line for line in runner.metrics("run") if "event" in line]

    try:
        runner.await_steps("run", process, 12)
        first, workers = events(), workers_of(process.pid)
        assert sorted(map(rank_of, workers)) == [0, 1, 2, 3]
        killed = [pid for pid in workers if rank_of(pid) in (1, 2)]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        last, due = runner.metrics("run")[-1]["step"], time.monotonic() + HANG_S
        while set(killed) & set(workers_of(process.pid)) or runner.metrics("run")[-1].get("step", 0) < last + 3:
            assert process.poll() is None and time.monotonic() < due, process.communicate()
            time.sleep(0.1)
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
    assert first[0]["how"] == "stage 2 is the average of 1 and 3" and first[1]["how"] == "stage 0 is a copy of 1"
    assert first[0]["cost_s"] < TIMEOUT / 2 + 10
    assert "generation 2: stage 2 is lost; stage 2 joins; stages 0, 1, 2, 3 go on after step 3" in out
    assert "stages 1 and 2 were lost together, and each is the other's neighbour: the run goes on from the" in out
    assert "a relative difference of 0\n" in out, "the checkpoint's next loss"
    lines = [line for line in runner.metrics("run") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, lines[-1]["step"] + 1))
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert runner.summary("run")["stopped"] == "SIGTERM"


def test_a_replica_that_hangs_is_ended_and_its_successor_copies_another(tmp_path: Path) -> None:
    runner = CommandRunner(tmp_path)
    flags = runner.flags(
        "run", workers=6, stages=3, local_size=1, strategy="sdp4bit", steps=1_000_000, timeout=TIMEOUT,
        tokens_per_step=96, checkpoint_every=0, sample_tokens=0, **{"pipeline.recover": "average"},
    )  # fmt: skip
    process = runner.start("train", *flags)
    try:
        runner.await_steps("run", process, 3)
        (frozen,) = [pid for pid in workers_of(process.pid) if rank_of(pid) == 3]
        os.kill(frozen, signal.SIGSTOP)
        due = time.monotonic() + HANG_S
        while not any("event" in line for line in runner.metrics("run")) or "event" in runner.metrics("run")[-1]:
            assert process.poll() is None and time.monotonic() < due, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process)
    finally:
        runner.close()
    assert code == 143 and not is_running(frozen), err
    assert f"rank 3 (pid {frozen}) has hung, and is ended" in err
    assert f"rank 3 (pid {frozen}) was killed by SIGKILL, and is started again (1 of 3)" in err
    (event, *_) = [line for line in runner.metrics("run") if "event" in line]
    assert event["how"] == "replica 1 of stage 1 is a copy of replica 0" and event["lost"] == [1]
    steps = [line["step"] for line in runner.metrics("run") if "loss" in line]
    assert steps == list(range(1, steps[-1] + 1))
