"""The emulated network in the kernel: what passes, what is counted, what is left behind (nothing)."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.support import HANG_S, needs_network, processes_with, wait_until
from thinwire.errors import ConfigError
from thinwire.lab import LabError, LabNetwork, LabSpec, network

pytestmark = needs_network

PR_CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21
MEGABYTE = 1_000_000
# Of a link that is fast at least once; a slow one never is.
TRIES = 20


@pytest.fixture(scope="module")
def lab() -> Iterator[LabNetwork]:
    with LabNetwork(LabSpec(nodes=3, rate="200mbit", slow={2: "5mbit"})) as made:
        yield made


def transfer(lab: LabNetwork, sender: int, receiver: int, num_bytes: int) -> float:
    """Send bytes from node to node; the seconds it took."""
    with lab.socket(receiver) as server, lab.socket(sender) as client:
        server.bind((lab.addresses[receiver], 0))
        server.listen()
        client.settimeout(HANG_S)
        client.connect(server.getsockname())
        peer, _ = server.accept()
        start = time.monotonic()
        with peer:
            thread = threading.Thread(target=client.sendall, args=(bytes(num_bytes),))
            thread.start()
            left = num_bytes
            while left:
                left -= len(peer.recv(1 << 16))
            thread.join()
            return time.monotonic() - start


def test_bytes_are_counted_where_they_pass(lab: LabNetwork) -> None:
    before = lab.counters()
    transfer(lab, 0, 1, 4 * MEGABYTE)
    sender, receiver, other = (now - then for now, then in zip(lab.counters(), before, strict=True))
    assert 4 * MEGABYTE < sender.sent_bytes < 4.1 * MEGABYTE
    assert 4 * MEGABYTE < receiver.received_bytes < 4.1 * MEGABYTE
    # At most an acknowledgement of each frame: how many frames one is for depends on what else the machine does.
    assert receiver.sent_bytes == sender.received_bytes < 4 * MEGABYTE / 1448 * 90
    assert other.sent_bytes + other.received_bytes < 1000


@pytest.mark.parametrize(("sender", "receiver"), [(0, 2), (2, 0)])
def test_nothing_is_faster_than_its_link(lab: LabNetwork, sender: int, receiver: int) -> None:
    # The bucket may give 2 frames at once; a busy machine can only make it slower.
    assert transfer(lab, sender, receiver, MEGABYTE // 2) > 0.95 * 4e6 / 5e6


def test_rates_can_be_lifted_and_put_back(lab: LabNetwork) -> None:
    lab.shape(False)
    try:
        # 1.6 s at the link's rate; a busy machine may hold up one of them.
        assert any(transfer(lab, 0, 2, MEGABYTE) < 0.8 for _ in range(TRIES))
    finally:
        lab.shape(True)
    assert transfer(lab, 0, 2, MEGABYTE // 2) > 0.76


def test_the_machine_itself_sees_none_of_it() -> None:
    before = socket.if_nameindex()
    with LabNetwork(LabSpec(nodes=2)) as lab:
        assert socket.if_nameindex() == before
        inside = lab.popen(1, ["cat", "/proc/net/dev"], stdout=subprocess.PIPE, text=True).communicate()[0]
    assert {line.split(":")[0].strip() for line in inside.splitlines()[2:]} == {"lo", "eth0"}


def test_a_command_is_known_by_one_pid(lab: LabNetwork) -> None:
    process = lab.popen(0, ["sh", "-c", "echo $$"], stdout=subprocess.PIPE, text=True)
    assert int(process.communicate()[0]) == process.pid


def test_exit_codes_and_signals_come_back(lab: LabNetwork) -> None:
    assert lab.popen(0, ["sh", "-c", "exit 7"]).wait(HANG_S) == 7
    assert lab.popen(0, ["sh", "-c", "kill -SEGV $$"]).wait(HANG_S) == -signal.SIGSEGV
    assert lab.popen(0, ["sh", "-c", "kill -KILL $$"]).wait(HANG_S) == -signal.SIGKILL
    assert lab.popen(0, ["/nowhere"], stderr=subprocess.DEVNULL).wait(HANG_S) == 127


def test_signals_reach_the_command(lab: LabNetwork) -> None:
    script = "trap 'echo got it; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    process = lab.popen(0, ["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=HANG_S)[0] == "got it\n"
    assert process.returncode == 5


def daemon(mark: str) -> str:
    """A script that starts a process in a session of its own, which nothing but its namespace ties to it."""
    return f"setsid sh -c 'sleep 1000; : {mark}' >/dev/null 2>&1 & echo started"


@pytest.mark.parametrize("end", ["by itself", "killed", "network closed"])
def test_nothing_that_a_command_started_outlives_it(end: str) -> None:
    mark = uuid.uuid4().hex
    with LabNetwork(LabSpec(nodes=1)) as lab:
        script = daemon(mark) + ("; sleep 0.2" if end == "by itself" else "; sleep 1000")
        process = lab.popen(0, ["sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        wait_until(lambda: processes_with(mark), "the daemon")
        if end == "killed":
            process.kill()
        if end != "network closed":
            process.wait(HANG_S)
            wait_until(lambda: not processes_with(mark), "the daemon's end")
    wait_until(lambda: not processes_with(mark), "the daemon's end")


def hold_a_network(mark: str, forked: Any, ready: Any) -> None:
    with LabNetwork(LabSpec(nodes=2)) as lab:
        # A forked child keeps every descriptor of ours open: the end must not depend on them.
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
        forked.value = child.pid
        process = lab.popen(1, ["sh", "-c", daemon(mark) + "; sleep 1000"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline()
        ready.set()
        process.wait()


def test_all_ends_with_a_killed_parent() -> None:
    mark = uuid.uuid4().hex
    context = multiprocessing.get_context("spawn")
    ready, forked = context.Event(), context.Value("i")
    parent = context.Process(target=hold_a_network, args=(mark, forked, ready))
    parent.start()
    try:
        assert ready.wait(HANG_S)
        holder = f"holder.py\0{parent.pid}\0"
        wait_until(lambda: processes_with(mark), "the daemon")
        assert len(processes_with(holder)) == 1
        parent.kill()
        parent.join()
        wait_until(lambda: not processes_with(mark), "the daemon's end")
        wait_until(lambda: not processes_with(holder), "the network's end")
    finally:
        parent.kill()
        if forked.value:
            os.kill(forked.value, signal.SIGKILL)


def test_a_network_may_outlive_the_thread_that_made_it() -> None:
    made: list[LabNetwork] = []
    thread = threading.Thread(target=lambda: made.append(LabNetwork(LabSpec(nodes=2))))
    thread.start()
    thread.join()
    with made[0] as lab:
        assert lab.popen(1, ["true"]).wait(HANG_S) == 0
        assert len(lab.counters()) == 2


def test_a_lost_holder_is_an_error() -> None:
    with LabNetwork(LabSpec(nodes=1)) as lab:
        lab._holder.kill()
        with pytest.raises(LabError, match="emulated network"):
            lab.counters()
            lab.counters()


USE = """
import subprocess
from thinwire.lab import LabSpec, LabNetwork
with LabNetwork(LabSpec(nodes=2)) as lab:
    print(lab.in_user_namespace, lab.popen(1, ["sh", "-c", "id -u; exit 4"]).wait())
"""


def without_rights() -> None:
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)


def test_a_user_namespace_takes_the_place_of_root() -> None:
    done = subprocess.run(
        [sys.executable, "-c", USE], preexec_fn=without_rights, capture_output=True, text=True, timeout=HANG_S
    )
    if "the lab can't make its network" in done.stderr:
        pytest.skip(f"user namespaces are not permitted here: {done.stderr.splitlines()[-1]}")
    assert done.stdout.split() == ["0", "True", "4"], done.stderr


def test_a_system_that_forbids_namespaces_is_named() -> None:
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        pytest.skip("unshare and setpriv are not installed")
    script = 'echo 0 >/proc/sys/user/max_user_namespaces; exec setpriv --bounding-set -sys_admin "$@"'
    words = ["unshare", "-r", "sh", "-c", script, "sh", sys.executable, "-c", USE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S)
    if "setpriv" in done.stderr or "unshare" in done.stderr.splitlines()[0]:
        pytest.skip(f"can't take rights away here: {done.stderr}")
    assert done.returncode == 1
    assert "ConfigError: the lab can't make its network" in done.stderr
    assert "user.max_user_namespaces is 0" in done.stderr


def test_delay_and_loss_need_netem() -> None:
    try:
        lab = LabNetwork(LabSpec(nodes=2, delay="100ms", loss="0.01%"))
    except ConfigError as error:
        assert "netem" in str(error)
        pytest.skip(str(error))
    with lab:
        start = time.monotonic()
        transfer(lab, 0, 1, 100_000)
        assert time.monotonic() - start > 0.1


def test_pyroute2_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[lab\]'"):
        LabNetwork(LabSpec())


def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"needs Linux.*darwin"):
        LabNetwork(LabSpec())


def test_two_nodes_can_have_a_rate_of_their_own() -> None:
    # At 200 Mbit/s half a megabyte takes 0.02 s. Buckets and the kernel's buffers let a part pass at once.
    at_5mbit, part = 4e6 / 5e6, 0.6
    with LabNetwork(LabSpec.from_text("nodes=3,rate=200mbit,link=2-0:5mbit")) as lab:
        assert str(lab.spec) == "nodes=3,rate=200mbit,local_size=1,link=0-2:5mbit"
        for pair in ((0, 2), (2, 0)):
            assert transfer(lab, *pair, MEGABYTE // 2) > part * at_5mbit
        assert any(transfer(lab, 0, 1, MEGABYTE // 2) < part * at_5mbit for _ in range(TRIES))
        lab.set_link(0, 2, "2.5mbit")
        assert transfer(lab, 0, 2, MEGABYTE // 2) > part * 2 * at_5mbit
        lab.set_link(0, 2, None)
        assert any(transfer(lab, 0, 2, MEGABYTE // 2) < part * at_5mbit for _ in range(TRIES))
        with pytest.raises(ConfigError, match="link 0-3: nodes are 0 to 2"):
            lab.set_link(3, 0, "1mbit")
