"""Whole runs through the command line: launcher, workers, sockets, signals, files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tomllib
from collections.abc import Iterator

import pytest

from tests.training.commands import HANG_S, THINWIRE, CommandRunner, finish, is_running, workers_of
from thinwire.launch.machine import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
METRICS_KEYS = [
    "step", "loss", "tokens", "step_s", "compute_s", "exposed_comm_s", "sent_bytes", "received_bytes", "lr",
    "grad_norm", "codec_s", "forward_s", "sent_weight_bytes", "peak_allocated_bytes", "damaged_messages",
    "pipeline_s", "bubble", "predicted_pipeline_s", "predicted_bubble", "disk_read_bytes", "disk_written_bytes",
    "disk_s", "exposed_disk_s", "dropped_rows", "needed_capacity", "experts_s", "predicted_experts_s",
    "teacher_loss",
]  # fmt: skip
SUMMARY_KEYS = {
    "heldout_loss", "tokens", "step_s", "tokens_per_s", "sent_bytes_per_step", "uncompressed_bytes_per_step",
    "strategy", "world_size", "versions", "parameters", "peak_rss_bytes",
    "peak_allocated_bytes", "device", "dtype",
}  # fmt: skip


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    runner = CommandRunner(tmp_path_factory.mktemp("runs"))
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def whole(runner: CommandRunner) -> str:
    """A run of six steps on two workers with a checkpoint in the middle; its standard output."""
    code, out, err = finish(runner.train("whole", checkpoint_every=3))
    assert code == 0, err
    return out


def losses(runner: CommandRunner, name: str) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runner.metrics(name)]


def test_a_run_keeps_the_contract(runner: CommandRunner, whole: str) -> None:
    folder = runner.folder / "whole"
    lines, summary = runner.metrics("whole"), runner.summary("whole")
    assert [list(line) for line in lines] == [METRICS_KEYS] * 6
    assert [line["tokens"] for line in lines] == [64 * step for step in range(1, 7)]
    assert all(abs(line["compute_s"] + line["exposed_comm_s"] - line["step_s"]) < 1e-9 for line in lines)
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["stopped"] == "finished" and summary["tokens"] == 384 and summary["world_size"] == 2
    assert 0 < summary["heldout_loss"] < 6
    assert summary["parameters"] == 180_672 and summary["peak_rss_bytes"] > 100 << 20
    assert all(0 < line["codec_s"] < line["step_s"] for line in lines)
    assert summary["sent_bytes_per_step"] < 0.25 * summary["uncompressed_bytes_per_step"]
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["steps"] == 6 and config["tokens_per_step"] == 64 and config["dtype"] == "fp32"
    assert (summary["device"], summary["dtype"], summary["peak_allocated_bytes"]) == ("cpu", "fp32", 0)
    assert config["device"] == "cpu" and any(row[0] == "--device auto" for row in summary["effects"])
    assert (folder / "report.html").stat().st_size > 1000
    for words in ("step 6/6", "held-out loss", "the model goes on", "report.html", "strategy sdp4bit"):
        assert words in whole


def test_resume_equals_the_uninterrupted_run_bit_for_bit(runner: CommandRunner, whole: str) -> None:
    again = runner.folder / "again"
    shutil.copytree(runner.folder / "whole", again)
    (again / "checkpoints" / "latest").write_text("step-00000003")
    (again / "summary.json").unlink()
    flags = ["--run-dir", str(again), "--resume"]
    code, out, err = finish(runner.start("train", *flags))
    assert code == 0, err
    assert "goes on after step 3" in out
    assert losses(runner, "again") == losses(runner, "whole")
    assert runner.metrics("again")[:3] == runner.metrics("whole")[:3]
    assert runner.metrics("again")[3] != runner.metrics("whole")[3], "times show that step 4 was taken again"
    assert runner.summary("again")["heldout_loss"] == runner.summary("whole")["heldout_loss"]


def test_torchrun_trains_the_same(runner: CommandRunner, whole: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = runner.flags("torchrun", workers=None)
    code, _, err = finish(runner.popen(*torchrun, "-m", "thinwire", "train", *flags))
    assert code == 0, err
    assert losses(runner, "torchrun") == losses(runner, "whole")


def test_two_machines_join(runner: CommandRunner) -> None:
    """Each with a disk of its own; one of them loses a file, and both go on from what they still have in common."""
    place = {"workers": 1, "join": f"127.0.0.1:{free_port()}", "nodes": 2, "strategy": "zero", "steps": 3}
    place |= {"checkpoint_every": 1, "eval_sequences": 0, "sample_tokens": 0}
    second = runner.train("second", node=1, **place)
    first = runner.train("first", node=0, **place)
    for process in (first, second):
        code, out, err = finish(process)
        assert code == 0, err
    assert "waiting for node 0" in out and "threads per worker" in out
    assert "step 3/3" in out and "finished after step 3; node 0 has the results" in out
    summary = runner.summary("first")
    assert summary["world_size"] == 2 and not (runner.folder / "second" / "summary.json").exists()
    assert any(row[:2] == ["topology", "2 node(s) x 1 rank(s)"] for row in summary["effects"])
    (runner.folder / "second/checkpoints/step-00000003/rank1/__0_0.distcp").unlink()
    before = losses(runner, "first")
    second = runner.start(*runner.again("second"), "--node", "1")
    code, out, err = finish(runner.start(*runner.again("first"), "--node", "0"))
    assert code == 0 and finish(second)[0] == 0, err
    assert "goes on after step 2 (the last that every rank has; their last ones are of steps [2, 3])" in out
    assert "resume proven: step 3" in out and losses(runner, "first") == before


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_stop_after_the_step_with_a_summary(
    runner: CommandRunner, signum: signal.Signals, expected: int
) -> None:
    name = f"stopped-{signum.name}"
    process = runner.train(name, steps=1_000_000)
    runner.await_steps(name, process)
    workers = workers_of(process.pid)
    process.send_signal(signum)
    code, _, err = finish(process)
    assert code == expected and "Traceback" not in err
    assert len(workers) == 2 and not any(map(is_running, workers))
    summary = runner.summary(name)
    assert summary["stopped"] == signum.name and summary["steps"] == len(runner.metrics(name))
    newest = (runner.folder / name / "checkpoints" / "latest").read_text()
    assert newest == f"step-{summary['steps']:08d}"


def test_a_killed_worker_is_named_and_nothing_is_lost(runner: CommandRunner) -> None:
    process = runner.train("killed", workers=3, steps=1_000_000)
    runner.await_steps("killed", process)
    workers = workers_of(process.pid)
    os.kill(workers[1], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    assert f"rank 1 (pid {workers[1]}) was killed by SIGKILL" in err and "Traceback" not in err
    assert err.count("\n") <= 3
    page = runner.folder / "killed" / "report.html"
    assert f"report: {page}; " in err and "The run was broken off after step" in page.read_text()
    assert not any(map(is_running, workers))
    steps = [line["step"] for line in runner.metrics("killed")]
    assert steps == list(range(1, len(steps) + 1)) and f"{len(steps)} steps in " in err
    log = (runner.folder / "killed" / "logs" / "rank0.log").read_text()
    missed = r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d .*PeerLostError: rank [12] is missing"
    assert re.search(missed, log), "a survivor says whom it misses, and when"


def test_a_worker_that_hangs_is_the_cause_that_is_told(runner: CommandRunner) -> None:
    process = runner.train("hung", workers=3, steps=1_000_000, timeout=30)
    runner.await_steps("hung", process)
    workers = workers_of(process.pid)
    os.kill(workers[1], signal.SIGSTOP)
    code, _, err = finish(process)
    assert code == 1 and "Traceback" not in err
    first = err.splitlines()[0]
    assert re.search(rf"rank 1 \(pid {workers[1]}\) has hung since about \d\d:\d\d:\d\d", first), err
    assert re.search(r"rank [02]: rank 1 is missing: \w+ \(message \d+\)", first), "names the operation"
    assert "SIGKILL" not in err and not any(map(is_running, workers))


STOPPED = """
import os, signal, sys

def stop_when_told(event, arguments):
    if event == "os.putenv" and arguments == (b"RANK", b"1"):
        os.kill(os.getpid(), signal.SIGSTOP)

sys.addaudithook(stop_when_told)
"""


def test_a_worker_that_hangs_while_it_starts_is_named(runner: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = runner.folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(STOPPED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")]))
    code, _, err = finish(runner.popen(*THINWIRE, "train", *runner.flags("silent", timeout=20)))
    assert code == 1 and "Traceback" not in err
    first = err.splitlines()[0]
    assert re.search(r"rank 1 \(pid \d+\) has hung since about", first), err
    assert "rank 1 is silent at the start of the run: rank 0 waits for its start since" in first


def test_workers_stop_when_the_launcher_is_killed(runner: CommandRunner) -> None:
    process = runner.popen(*THINWIRE, "train", *runner.flags("orphans", steps=1_000_000))
    runner.await_steps("orphans", process)
    workers = workers_of(process.pid)
    process.kill()
    try:
        process.communicate(timeout=HANG_S)
        assert runner.summary("orphans")["stopped"] == "the end of its launcher"
        assert not any(map(is_running, workers[1:]))
    finally:
        for pid in filter(is_running, workers):
            os.kill(pid, signal.SIGKILL)


def test_a_run_that_learns_nothing_says_so_and_ends(runner: CommandRunner) -> None:
    process = runner.train("dead", workers=1, steps=100, lr=1e30, optimizer="sgd", grad_clip=0)
    code, out, err = finish(process)
    assert code == 1 and "Traceback" not in err
    assert out.count("WARNING: step ") == 20 and "skipped on all ranks" in out
    assert "20 steps in a row" in err and "lower learning rate" in err
    assert runner.metrics("dead")[-1]["grad_norm"] is None
