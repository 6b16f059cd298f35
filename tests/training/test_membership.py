"""A worker of an island dies: the other island goes on, and the launcher starts the first one again, which joins."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.training.commands import HANG_S, CommandRunner, children, finish, is_running
from thinwire.convert.saved import load_run
from thinwire.launch.failures import failure, has_failed_by_itself
from thinwire.run.run_dir import RunDir

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]


def test_an_island_that_died_comes_back_and_all_stop_at_the_same_step(tmp_path: Path) -> None:
    runner = CommandRunner(tmp_path)
    flags = runner.flags(
        "run", workers=4, local_size=2, strategy="streaming-diloco", inner="sdp4bit", steps=1_000_000, timeout=20,
        **{"streamingdiloco.sync-every": 6, "streamingdiloco.num-fragments": 2},
    )  # fmt: skip
    asked = (
        "kill rank=1 island=1 step=10", "kill rank=1 island=0 step=999999", "corrupt island=1 operation=outer step=6",
    )  # fmt: skip
    process = runner.start("train", *flags, *(word for text in asked for word in ("--inject", text)))

    def lines(name: str, key: str) -> list[dict]:
        return [line for line in runner.metrics(name) if key in line]

    try:
        runner.await_steps("run/island-1", process, 4)
        started = set(descendants(process.pid))
        # Started again, it writes behind what it wrote before.
        runner.await_that(lambda: bool(lines("run/island-1", "event")), process)
        runner.await_that(lambda: "step" in runner.metrics("run/island-1")[-1], process)
        joined = lines("run/island-1", "event")
        started |= set(descendants(process.pid))
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
    finally:
        runner.close()
    assert code == 143 and "Traceback" not in err, err
    assert "island 1 failed with exit code 1, and is started again (1 of 3)" in err
    assert f"fault injected in step 10: {asked[0]}" in err and f"--inject {asked[1]!r} never happened" in err
    assert all(f"--inject {text!r}: armed" in out for text in asked)
    assert "island 1 is lost" in out and "island 1 joins" in out
    assert "strategy streaming-diloco: sdp4bit inside each island" in out
    assert len(started) >= 9 and not any(map(is_running, started)), "launchers and workers, twice those of island 1"
    changes = lines("run", "event")
    assert changes[0]["lost"] == [1] and changes[-1]["members"] == [0, 1]
    assert [line["joined"] for line in joined] == [[1]] and joined[0]["cost_s"] >= 0
    steps = [[line["step"] for line in lines(name, "step")] for name in ("run", "run/island-1")]
    assert steps[0] == list(range(1, steps[0][-1] + 1)) and steps[1][-1] == steps[0][-1]
    assert len(steps[1]) < steps[1][-1], "it has missed some"
    losses = [line["loss"] for line in lines("run", "loss")]
    assert all(map(math.isfinite, losses))
    first, second = (runner.summary(name) for name in ("run", "run/island-1"))
    assert first["stopped"] == "SIGTERM" and first["steps"] == second["steps"]
    # A step without an exchange has the inner strategy's bytes alone.
    assert min(line["sent_bytes"] for line in lines("run", "loss")) < 0.1 * first["uncompressed_bytes_per_step"]
    assert sum(line["damaged_messages"] for line in lines("run", "loss")) == 1, "the one that was sent again"
    # What export and generate take from a run: here the inner weights differ.
    weights = [dict(load_run(str(tmp_path / name)).model.named_parameters()) for name in ("run", "run/island-1")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


ORPHAN = """
import os, signal, time
from thinwire.launch.islands import IslandPlace, follow_command

follow_command(IslandPlace(1, 2, "127.0.0.1:{port}"))
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60)
"""


def test_launchers_end_with_the_command_that_started_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as meeting, socket.socket() as deaf:
        # Bound and not listening: it answers nobody, and no other test can take it.
        deaf.bind(("127.0.0.1", 0))
        ports = {"it leaves the others": meeting.getsockname()[1], "all islands stop": deaf.getsockname()[1]}
        commands = {
            what: subprocess.Popen(
                ["sh", "-c", '"$0" -c "$1"; exit', sys.executable, ORPHAN.format(port=port)],
                stderr=subprocess.PIPE, text=True,
            )
            for what, port in ports.items()
        }  # fmt: skip
        for what, command in commands.items():
            # Open for as long as the launcher is there.
            _, err = command.communicate(timeout=HANG_S)
            assert err == f"thinwire: island 1: the command that started it is gone: {what}\n"


def test_a_worker_whose_libraries_find_no_memory_says_so(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    (run_dir.logs / "rank1.log").write_text("cannot allocate memory for thread-local data: ABORT\n")

    def told(exit_code: int, memory: str | None) -> str:
        return str(failure({1: ProcessFailure(1, 7, exit_code, "none")}, run_dir, 20.0, memory=memory))

    assert told(127, "480mb").startswith("rank 1 could not load its libraries in --memory 480mb; nearest: --memory 600")
    assert "its libraries" not in told(127, None) and "its libraries" not in told(1, "480mb")


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)\nframe #0: somewhere",
        "RuntimeError: can't start new thread",
        "MemoryError",
    ],
)
def test_a_worker_that_needs_more_than_its_budget_says_so(message: str, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "1"}}}))

    def told(memory: str | None) -> str:
        failures = {1: ProcessFailure(1, 7, 1, str(tmp_path / "error.json"))}
        return str(failure(failures, RunDir(tmp_path), 20.0, memory=memory)).splitlines()[0]

    assert told("480mb").startswith(f"rank 1 needed more than --memory 480mb ({message.splitlines()[0]}); nearest: ")
    assert "--memory 600mb, or leave --memory out" in told("480mb") and told(None).startswith("rank 1: ")


@pytest.mark.parametrize("message", ["PeerLostError: rank 3 is missing", "ConfigError: of two minds", "ValueError: no"])
def test_the_first_that_failed_is_named_and_none_that_was_ended_for_it(message: str, tmp_path: Path) -> None:
    told = {"message": {"message": message, "extraInfo": {"timestamp": "1"}}}
    (tmp_path / "error.json").write_text(json.dumps(told))
    ended = [ProcessFailure(rank, 10 + rank, -signal.SIGTERM, "none") for rank in range(3)]
    failed = ProcessFailure(1, 11, 1, str(tmp_path / "error.json"))
    ended[0].timestamp = 0
    said = str(failure({0: ended[0], 1: failed, 2: ended[2]}, RunDir(tmp_path), 20.0))
    assert said.startswith("rank 1: ") and message.partition(": ")[2] in said and "SIGTERM" not in said
    # Where all were ended so, there is nobody else to name.
    assert "rank 0: Signal 15" in str(failure({0: ended[0], 2: ended[2]}, RunDir(tmp_path), 20.0))


def test_what_is_told_after_a_signal_is_no_consequence_of_it(tmp_path: Path) -> None:
    def failed(exit_code: int, message: str) -> ProcessFailure:
        told = {"message": {"message": message, "extraInfo": {"timestamp": "1"}}}
        (tmp_path / "error.json").write_text(json.dumps(told))
        return ProcessFailure(0, 1, exit_code, str(tmp_path / "error.json"))

    assert has_failed_by_itself(failed(1, "ThinwireError: nobody answers at the meeting"))
    assert not has_failed_by_itself(failed(1, "PeerLostError: rank 0 is missing"))
    assert not has_failed_by_itself(failed(-signal.SIGKILL, "")) and not has_failed_by_itself(failed(-15, ""))
