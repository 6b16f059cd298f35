"""A command on every node: its place among the ranks, its output, and what follows when one of them fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.meter_worker import MESSAGES
from tests.lab.support import HANG_S, needs_network
from thinwire.errors import ConfigError
from thinwire.lab import Job, LabNetwork, LabSpec, environment, start
from thinwire.lab.run import threads_per_rank

pytestmark = needs_network

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_PORT")  # fmt: skip
SHOW = f"import json, os; print(json.dumps({{k: os.environ.get(k) for k in {PLACE}}}), flush=True)"


@pytest.fixture(scope="module")
def lab() -> Iterator[LabNetwork]:
    with LabNetwork(LabSpec(nodes=2, local_size=2, rate="1gbit")) as made:
        yield made


def run(lab: LabNetwork, command: list[str], **more: float) -> tuple[Job, dict[int, list[str]]]:
    lines: dict[int, list[str]] = {rank: [] for rank in range(lab.spec.world_size)}
    job = start(lab, command, on_line=lambda rank, line: lines[rank].append(line), **more)  # type: ignore[arg-type]
    job.wait(HANG_S)
    return job, lines


def test_a_node_looks_like_one_of_torchruns(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29500"]
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=HANG_S)
    with LabNetwork(LabSpec(nodes=1, local_size=2)) as one:
        _, lines = run(one, [sys.executable, str(script)])
    # Two processes write to one pipe, and their newlines may come late.
    shown = [line for line in done.stdout.replace("}{", "}\n{").splitlines() if line]
    assert sorted(shown) == [lines[0][0], lines[1][0]], done.stderr


def test_ranks_go_through_the_nodes_in_order(lab: LabNetwork) -> None:
    _, lines = run(lab, [sys.executable, "-c", SHOW])
    for rank in range(4):
        place = json.loads(lines[rank][0])
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank % 2,
            "GROUP_RANK": rank // 2,
            "WORLD_SIZE": 4,
            "GROUP_WORLD_SIZE": 2,
        }
        assert place | {name: str(value) for name, value in expected.items()} == place


def test_addresses_have_the_names_of_their_nodes(lab: LabNetwork) -> None:
    show = "import socket, sys; print(*(socket.getnameinfo((each, 1), 0)[0] for each in sys.argv[1:]))"
    mapped = [f"::ffff:{address}" for address in lab.addresses]
    before = Path("/etc/hosts").read_text()
    _, lines = run(lab, [sys.executable, "-c", show, *lab.addresses, *mapped])
    names = " ".join(f"node{number}" for number in range(len(lab.addresses)))
    assert lines[0] == [f"{names} {names}"]
    assert Path("/etc/hosts").read_text() == before


def test_the_environment_leads_to_node_0(lab: LabNetwork) -> None:
    third = environment(lab, 2, port=1234)
    assert (third["MASTER_ADDR"], third["MASTER_PORT"], third["NODE_RANK"]) == (lab.addresses[0], "1234", "1")
    assert third["GLOO_SOCKET_IFNAME"] == lab.interface


def test_every_line_comes_with_its_rank(lab: LabNetwork) -> None:
    job, lines = run(lab, ["sh", "-c", "echo out $RANK; echo err $RANK >&2; printf 'no newline'"])
    assert job.poll() == [0, 0, 0, 0] and job.exit_code == 0 and job.failed is None
    assert lines == {rank: [f"out {rank}", f"err {rank}", "no newline"] for rank in range(4)}


def test_a_dead_rank_ends_the_others_and_is_named(lab: LabNetwork) -> None:
    job, _ = run(lab, ["sh", "-c", "test $RANK != 2 || exit 9; sleep 1000"], grace_s=2.0)
    assert job.failed == (2, 9) and job.exit_code == 9 and job.was_cut
    assert job.poll() == [-signal.SIGTERM, -signal.SIGTERM, 9, -signal.SIGTERM]


def test_who_ignores_the_end_is_killed(lab: LabNetwork, tmp_path: Path) -> None:
    # The others must be deaf before rank 0 ends.
    deaf = f"trap '' TERM; touch {tmp_path}/$RANK; sleep 1000 & wait; wait"
    script = (
        f"test $RANK = 0 || {{ {deaf}; }}; while test $(ls {tmp_path} | wc -l) -lt 3; do sleep 0.05; done; kill -9 $$"
    )
    job, _ = run(lab, ["sh", "-c", script], grace_s=0.2)
    assert job.failed == (0, -signal.SIGKILL) and job.exit_code == 137
    assert job.poll() == [-signal.SIGKILL] * 4


def test_the_worst_exit_code_counts(lab: LabNetwork) -> None:
    job, _ = run(lab, ["sh", "-c", "exit $RANK"])
    assert job.poll() == [0, 1, 2, 3] and job.exit_code == 3 and set(job.failures) == {1, 2, 3}


def test_stop_is_no_failure(lab: LabNetwork) -> None:
    ready: list[int] = []
    script = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    job = start(lab, ["sh", "-c", script], on_line=lambda rank, line: ready.append(rank))
    due = time.monotonic() + HANG_S
    while len(ready) < 4:
        assert time.monotonic() < due
        time.sleep(0.02)
    assert job.poll() is None
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1, 2, 3\] are still running"):
        job.wait(0.1)
    assert job.stop() == [0, 0, 0, 0] and job.failed is None


def test_a_command_that_is_not_there(lab: LabNetwork) -> None:
    with pytest.raises(ConfigError, match="'no-such-program' was not found"):
        start(lab, ["no-such-program"])
    with pytest.raises(ConfigError, match="no command to run"):
        start(lab, [])


def test_threads_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(LabSpec(nodes=1), {})[0] == cores
    assert threads_per_rank(LabSpec(nodes=100), {})[0] == 1 or cores >= 200
    assert threads_per_rank(LabSpec(nodes=1), {"OMP_NUM_THREADS": "3"}) == (3, "was set")


def test_the_meter_and_the_kernel_agree() -> None:
    """What the kernel counts is the meter's payload, and the headers of TCP, IP, Ethernet and gloo: under 4 %."""
    with LabNetwork(LabSpec(nodes=4, rate="1gbit")) as lab:
        job, lines = run(lab, [sys.executable, "-m", "tests.lab.meter_worker"])
        assert job.poll() == [0] * 4, lines
        for rank, counted in enumerate(lab.counters()):
            sent_bytes, received_bytes = json.loads(lines[rank][-1])
            assert sent_bytes >= 3 * MESSAGES * (1 << 20)
            assert 0 < counted.sent_bytes / sent_bytes - 1 < 0.04
            assert 0 < counted.received_bytes / received_bytes - 1 < 0.04
