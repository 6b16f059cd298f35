"""Runs a command in a node's network, and ends all of its processes with it.

    python enter.py PARENT_PID USER_FD NET_FD ADDRESSES COMMAND...

There are three processes. This one is outside and passes signals in and the exit status out. The second is the first
process of a new PID namespace; the kernel kills it with this one, and with it everything inside. The third is the
command. No process of the command, not even a daemon, outlives the command, this process or its parent.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import NoReturn

from syscalls import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    MS_BIND,
    MS_NOSUID_NODEV_NOEXEC,
    MS_REC_PRIVATE,
    die_with_parent,
    mount,
    setns,
    unshare,
)

RELAYED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# A shell's exit code for a command that it can't run.
NOT_EXECUTABLE, NOT_FOUND = 126, 127


def main() -> NoReturn:
    parent_pid, user_fd, net_fd = map(int, sys.argv[1:4])
    signal.pthread_sigmask(signal.SIG_BLOCK, RELAYED)
    parent = os.pidfd_open(parent_pid)
    if os.getppid() != parent_pid:
        os._exit(1)
    if user_fd >= 0:
        setns(user_fd, CLONE_NEWUSER)
    setns(net_fd, CLONE_NEWNET)
    unshare(CLONE_NEWPID | CLONE_NEWNS, "CLONE_NEWPID | CLONE_NEWNS")
    status_in, status_out = os.pipe()
    outside, outside_pid = os.pidfd_open(os.getpid()), os.getpid()
    inside = os.fork()
    if inside == 0:
        die_with_parent()
        if is_ended(outside):
            os._exit(1)
        be_first(outside_pid, status_out, sys.argv[4], sys.argv[5:])
    os.close(status_out)
    watch(inside, parent, status_in)


def be_first(outside_pid: int, status_out: int, addresses: str, command: list[str]) -> NoReturn:
    """The first process of the PID namespace: starts the command, reaps orphans, reports how the command ended."""
    with contextlib.suppress(OSError):
        # The command sees its PID outside: it is unique on this machine, and `kill` works with it.
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(outside_pid - 1))
    with contextlib.suppress(OSError):
        # If a container forbids it, the old /proc and names stay. Its /proc/self is also right.
        mount("none", "/", "", MS_REC_PRIVATE)
        mount("proc", "/proc", "proc", MS_NOSUID_NODEV_NOEXEC)
        name_nodes(addresses)
    child = os.fork()
    if child == 0:
        execute(command)
    relay_to(child)
    while True:
        pid, status = os.wait()
        if pid == child:
            os.write(status_out, str(status).encode())
            os._exit(0)


def name_nodes(addresses: str) -> None:
    """Add the nodes' names to this mount namespace's /etc/hosts: no name server can be asked here, and torch asks."""
    hosts = Path("/etc/hosts")
    # The second is how a socket for both kinds of addresses knows the first.
    lines = [f"{each} node{n}\n::ffff:{each} node{n}\n" for n, each in enumerate(addresses.split(","))]
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("".join([hosts.read_text(), "\n", *lines]))
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        # The file stays while it is mounted.
        mount(file.name, str(hosts), "", MS_BIND)


def execute(command: list[str]) -> NoReturn:
    """Replace this process by the command, with default handlers for the signals that Python changed."""
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RELAYED)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"thinwire lab: can't run {command[0]}: {error.strerror}\n".encode())
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


def relay_to(pid: int) -> None:
    """Pass signals on to `pid` from now on, also signals that came earlier."""

    def relay(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    for signum in RELAYED:
        signal.signal(signum, relay)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RELAYED)


def watch(inside: int, parent: int, status_in: int) -> NoReturn:
    """End with the command's exit status. End the command if the parent ends."""
    relay_to(inside)
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(inside_fd := os.pidfd_open(inside), select.POLLIN)
    ready = [fd for fd, _ in poll.poll()]
    if inside_fd not in ready:
        os.kill(inside, signal.SIGKILL)
    _, status = os.waitpid(inside, 0)
    report = os.read(status_in, 32)
    end_as(os.waitstatus_to_exitcode(int(report) if report else status))


def end_as(code: int) -> NoReturn:
    """Exit with the code, or by the same signal if it is negative."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def is_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


if __name__ == "__main__":
    main()
