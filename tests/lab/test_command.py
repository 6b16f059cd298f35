"""`thinwire lab` from the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.support import HANG_S, REASON, needs_network, processes_with, wait_until
from thinwire.calibration.process import USUAL
from thinwire.cost import Machine
from thinwire.errors import ConfigError, Problems
from thinwire.lab import LabError, check
from thinwire.lab.command import run_lab
from thinwire.lab.network import LabNetwork
from thinwire.lab.spec import LabSpec
from thinwire.planner.memory import error_of, fitted, read_runs
from thinwire.run.settings import read_toml

THINWIRE = [sys.executable, "-m", "thinwire"]


def counted(output: str) -> dict[int, tuple[int, int]]:
    """Bytes sent and received by node, from the table at the end."""
    rows = re.findall(r"^thinwire lab: +(\d+) +\S+ +([\d,]+) +([\d,]+)$", output, flags=re.MULTILINE)
    return {int(node): (int(sent.replace(",", "")), int(received.replace(",", ""))) for node, sent, received in rows}


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--nods", "4", "--", "true"], ["unknown flag --nods; did you mean '--nodes'"]),
        (["--nodes", "2", "true"], ["2 problems", "unexpected 'true': the command to run", "no command"]),
        (["--rate", "100", "--slow", "7=fast", "--slow", "x", "--", "no-such-program"],
         ["5 problems", "'100mbit'", "rate 'fast'", "slow node 7", "slow 'x'", "'no-such-program' was not found"]),
        (["--disk-rate", "500MB", "--", "true"], ["disk rate '500MB': is not a size a second"]),
        (["--memory", "0gb", "--", "true"], ["--memory '0gb': must be above 0; nearest: '1gb'"]),
        (["--memory", "100mb", "--", *THINWIRE, "train"], ["--memory '100mb': must be above the 480 MB", "'1gb'"]),
        (["--check", "--", "true"], ["--check runs no command: leave out 'true'"]),
        (["--check", "--nodes", "0"], ["nodes 0 must be from 1"]),
        (["--check", "--nodes", "1"], ["--check: a network of 1 node has no link", "nearest: --nodes 2"]),
    ],
)  # fmt: skip
def test_what_can_not_work_is_refused(args: list[str], parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.calibration.process.process_memory", lambda: USUAL)
    with pytest.raises(ConfigError) as caught:
        run_lab(args)
    for part in parts:
        assert part in str(caught.value)


@needs_network
def test_output_is_merged_and_bytes_are_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = "echo rank $RANK of $WORLD_SIZE with $OMP_NUM_THREADS at $THINWIRE_DISK_RATE in $THINWIRE_LAB"
    words = ["--nodes", "2", "--local-size=2", "--slow", "1=20mbit", "--disk-rate", "50MB/s"]
    assert run_lab([*words, "--", "sh", "-c", script]) == 0
    output, lab = capfd.readouterr().out, f"thinwire lab {' '.join(words)}"
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    for rank in range(4):
        assert f"[node {rank // 2} rank {rank}] rank {rank} of 4 with {threads} at 50MB/s in {lab}\n" in output
    assert "2 node(s) x 2 rank(s), links of 100mbit, node 1: 20mbit" in output
    assert f"OMP_NUM_THREADS={threads} (" in output
    assert counted(output).keys() == {0, 1}


@needs_network
def test_the_error_names_the_node(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LabError, match=r"^node 1 ended with exit code 3$") as caught:
        run_lab(["--nodes", "2", "--", "sh", "-c", "test $RANK != 1 || exit 3"])
    assert caught.value.exit_code == 3
    assert counted(capfd.readouterr().out).keys() == {0, 1}


@needs_network
def test_check_measures_every_direction(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "WINDOW_S", 0.3)
    monkeypatch.setattr(check, "WARM_UP_S", 0.1)
    run_lab(["--check", "--nodes", "3", "--rate", "100mbit", "--slow", "2=50mbit"])
    output = capfd.readouterr().out
    rows = re.findall(r"(\d) +(sends|receives|receives from 2) +(\d+) +[\d.]+ +[\d.]+ +([\d.]+)", output)
    directions = ["sends", "receives", "receives from 2"]
    assert [row[:3] for row in rows] == [(str(n), d, "50" if n == 2 else "100") for n in range(3) for d in directions]
    # Never much faster than its rate; how much slower depends on what else the machine does.
    assert all(0.0 < float(row[3]) < 1.15 for row in rows)


@needs_network
def test_check_fails_where_a_link_is_off(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "measure", lambda *args, **more: (90e6, 89e6))
    assert run_lab(["--check", "--nodes", "2", "--rate", "100mbit"]) == 1
    assert "0.900  more than 5% off" in capfd.readouterr().out
    with LabNetwork(LabSpec(nodes=2, rate="90mbit")) as lab:
        assert check.check(lab, lambda reading: None)


@needs_network
def test_output_that_nobody_reads() -> None:
    process = subprocess.Popen(
        [*THINWIRE, "lab", "--nodes", "1", "--", "yes", "x" * 1000], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    assert process.wait(HANG_S) == 128 + signal.SIGPIPE
    wait_until(lambda: not processes_with("x" * 1000), "the command's end")


def test_interrupted(lab_process: subprocess.Popen[str]) -> None:
    lab_process.send_signal(signal.SIGINT)
    output = lab_process.communicate(timeout=HANG_S)[0]
    assert lab_process.returncode == 130
    assert "[node 1] tidied up" in output and "stopped by SIGINT" in output
    assert counted(output).keys() == {0, 1}


def test_killed(lab_process: subprocess.Popen[str]) -> None:
    lab_process.kill()
    lab_process.communicate(timeout=HANG_S)


@pytest.fixture
def lab_process() -> Iterator[subprocess.Popen[str]]:
    """A lab whose command has started a process in a session of its own; nothing of it may be left afterwards."""
    if REASON:
        pytest.skip(f"no emulated network here: {REASON}")
    mark = uuid.uuid4().hex
    daemon = f"setsid sh -c 'sleep 1000; : {mark}' &"
    script = f"trap 'echo tidied up; exit 0' INT; {daemon} echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [*THINWIRE, "lab", "--nodes", "2", "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        # Tests that run in a shell's background have SIGINT ignored, and a shell can't trap what it was born ignoring.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    ready = 0
    while ready < 2:
        line = process.stdout.readline()
        assert line, "the lab ended too early"
        ready += "ready" in line
    yield process
    wait_until(lambda: not processes_with(mark), "the end of what the command started")
    wait_until(lambda: not processes_with(f"holder.py\0{process.pid}\0"), "the network's end")


@needs_network
def test_training_in_the_lab(tmp_path: Path) -> None:
    """Under a plan of faster links, which have drifted since."""
    data, run_dir, plan = tmp_path / "data.txt", tmp_path / "run", tmp_path / "plan.json"
    links = {"rates": [[None, 5e7], [5e7, None]], "link_bytes": [[0, 5e6], [5e6, 0]]}
    plan.write_text(json.dumps({**links, "predicted": {"step_s": 1.0}}))
    data.write_text("".join(f"line {n} of {n * n} lines\n" for n in range(3000)))
    train = [
        *THINWIRE, "train", "--model", "tiny", "--data", str(data), "--cache-dir", str(tmp_path / "cache"),
        "--steps", "4", "--seq-len", "16", "--micro-batch", "2", "--eval-sequences", "0", "--sample-tokens", "0",
        "--dtype", "fp32", "--local-size", "1", "--run-dir", str(run_dir), "--strategy", "zero", "--plan", str(plan),
    ]  # fmt: skip
    done = subprocess.run(
        [*THINWIRE, "lab", "--nodes", "2", "--", *train], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[c10d]" not in done.stdout + done.stderr, "torch finds the names of addresses"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["world_size"] == 2
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    payload = sum(step["sent_bytes"] for step in steps)
    for sent_bytes, received_bytes in counted(done.stdout).values():
        assert min(sent_bytes, received_bytes) > payload > 0
    # What measuring the links sends belongs to no step.
    assert steps[0]["sent_bytes"] <= steps[-1]["sent_bytes"]
    for a, b in ((0, 1), (1, 0)):
        for when in ("since the plan was made", "while the plan was followed"):
            assert f"WARNING: the link {a} to {b} has drifted {when}: 400 Mbit/s planned" in done.stdout
    page = (run_dir / "report.html").read_text()
    assert "The plan against the run" in page and "Links that have drifted" in page


@needs_network
def test_ranks_of_a_node_are_measured_on_the_whole_of_its_link(tmp_path: Path) -> None:
    """Two nodes of two ranks: the pairs between the nodes don't share the link while it is measured."""
    file = tmp_path / "machine.json"
    calibrate = [*THINWIRE, "calibrate", "--models", "tiny", "--out", str(file)]
    lab = [*THINWIRE, "lab", "--nodes", "2", "--local-size", "2", "--rate", "20mbit", "--"]
    done = subprocess.run([*lab, *calibrate], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = Machine.read(file)
    assert found.network.nodes == (0, 0, 1, 1) and "--device auto: cpu" in done.stdout
    between = {found.network.rates[a][b] for a, b in found.network.pairs if a // 2 != b // 2}
    # One pair stands for the four of each direction.
    # Other programs make a direction slower; pairs that share the link would make both.
    assert len(between) <= 2 and 0.6 < max(between) / 2.5e6 < 1.2, between
    assert found.network.rates[0][1] > 10 * max(between)


@needs_network
def test_a_run_in_the_lab_plans_around_its_bad_link(tmp_path: Path) -> None:
    """Three nodes, of which 0 and 1 hardly reach each other; the run is then one from which memory is learnt."""
    data, run_dir = tmp_path / "data.txt", tmp_path / "run"
    data.write_text("".join(f"line {n} of {n * n} lines\n" for n in range(3000)))
    train = [
        *THINWIRE, "train", "--strategy", "auto", "--model", "tiny", "--data", str(data), "--cache-dir",
        str(tmp_path / "cache"), "--steps", "4", "--seq-len", "64", "--micro-batch", "4", "--tokens-per-step", "768",
        "--eval-sequences", "0", "--sample-tokens", "0", "--dtype", "fp32", "--run-dir", str(run_dir),
    ]  # fmt: skip
    lab = [*THINWIRE, "lab", "--nodes", "3", "--link", "0-1=2mbit", "--"]
    done = subprocess.run([*lab, *train], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads((run_dir / "plan.json").read_text())
    rates, carried = plan["rates"], plan["link_bytes"]
    assert rates[0][1] < 0.2 * rates[0][2]
    assert carried[0][1] == carried[1][0] == 0 < carried[0][2] + carried[2][0], plan["flags"]
    assert "kept out of use" in done.stdout
    config = read_toml(run_dir / "config.toml", Problems())
    assert config.plan == str(run_dir / "plan.json") and config.strategy != "auto"
    page = (run_dir / "report.html").read_text()
    assert "The plan against the run" in page
    (recorded,) = read_runs(tmp_path)
    learnt, why = fitted([recorded])
    assert "fitted to 1 runs" in why and error_of(learnt, [recorded]) < 0.01
