"""Runs a command on every node of an emulated network, like torchrun."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.lab.network import LabNetwork
from thinwire.lab.spec import LabSpec

PORT = 29500
GRACE_S = 5.0
POLL_S = 0.02
OnLine = Callable[[int, str], None]


def environment(network: LabNetwork, rank: int, port: int = PORT) -> dict[str, str]:
    """The variables that torchrun sets for one rank, and the interface that gloo must use."""
    spec = network.spec
    node, local_rank = divmod(rank, spec.local_size)
    numbers = {
        "RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": spec.world_size, "LOCAL_WORLD_SIZE": spec.local_size,
        "NODE_RANK": node, "GROUP_RANK": node, "GROUP_WORLD_SIZE": spec.nodes, "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": spec.world_size, "MASTER_PORT": port,
    }  # fmt: skip
    texts = {"MASTER_ADDR": network.addresses[0], "ROLE_NAME": "default", "GLOO_SOCKET_IFNAME": network.interface}
    return {name: str(value) for name, value in numbers.items()} | texts


class Job:
    """A command that runs once per rank. Made by `start`.

    If a rank fails, the others get `grace_s` seconds to end by themselves, then SIGTERM, then, after as long again,
    SIGKILL.
    """

    def __init__(self, processes: list[subprocess.Popen], readers: list[threading.Thread], grace_s: float) -> None:
        self.processes = processes
        self.failures: dict[int, int] = {}
        self._readers = readers
        self._grace_s = grace_s
        # Ranks that were sent a signal. Their exit does not count as a failure.
        self._signalled: set[int] = set()
        # Reentrant, because a signal handler may interrupt the thread that holds it.
        self._lock = threading.RLock()
        self._watcher = threading.Thread(target=self._watch, name="thinwire-lab", daemon=True)
        self._watcher.start()

    def poll(self) -> list[int] | None:
        """Exit code of every rank, -signal if a signal ended it; None while a rank runs or its output is unread."""
        return None if self._watcher.is_alive() else [process.returncode for process in self.processes]

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """Wait until all ranks have ended. Return their exit codes. Raises TimeoutError."""
        self._watcher.join(timeout_s)
        codes = self.poll()
        if codes is None:
            raise TimeoutError(f"ranks {self._running()} are still running after {timeout_s:g} s")
        return codes

    def send_signal(self, signum: int) -> None:
        """Send a signal to every running rank. Its exit then does not count as a failure."""
        with self._lock:
            for rank in self._running():
                self._signalled.add(rank)
                self.processes[rank].send_signal(signum)

    def stop(self, signum: int = signal.SIGTERM, grace_s: float = GRACE_S) -> list[int]:
        """Send `signum` to every rank, and SIGKILL to those that run after `grace_s`. Return the exit codes."""
        self.send_signal(signum)
        try:
            return self.wait(grace_s)
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            return self.wait()

    @property
    def failed(self) -> tuple[int, int] | None:
        """The first rank that failed by itself and its exit code (or -signal); None if none did.

        `failures` holds all of them, in the order in which they were seen.
        """
        return next(iter(self.failures.items()), None)

    @property
    def was_cut(self) -> bool:
        """Whether this object ended ranks by a signal."""
        return bool(self._signalled)

    @property
    def exit_code(self) -> int:
        """Worst exit code of the ranks that ended by themselves, as a shell reports it; 0 if none failed."""
        return max(map(shell_code, self.failures.values()), default=0)

    def _running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def _watch(self) -> None:
        due_s, ending = None, iter([signal.SIGTERM])
        while self._note_failures():
            now = time.monotonic()
            if self.failures and due_s is None:
                due_s = now + self._grace_s
            if due_s is not None and now >= due_s:
                self.send_signal(next(ending, signal.SIGKILL))
                due_s = now + self._grace_s
            time.sleep(POLL_S)
        for reader in self._readers:
            reader.join()

    def _note_failures(self) -> list[int]:
        """Record the failures of ranks that have ended. Return the running ranks."""
        with self._lock:
            running = self._running()
            # If ranks fail at the same moment, a killed one is the cause: the others failed because it was missing.
            for rank, process in sorted(enumerate(self.processes), key=lambda item: (item[1].returncode or 0) >= 0):
                if process.returncode and rank not in self._signalled and rank not in self.failures:
                    self.failures[rank] = process.returncode
            return running


def shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def start(
    network: LabNetwork,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    on_line: OnLine | None = None,
    port: int = PORT,
    grace_s: float = GRACE_S,
    memory_bytes: int | None = None,
) -> Job:
    """Run `command` once per rank, with torchrun's variables added to `env` (this process's own by default).

    Args:
        on_line: called from a thread per rank with every line of its output, stdout and stderr together; it must not
            raise. None: the ranks write to this process's output.
        port: port on node 0 where the ranks meet.
        grace_s: see Job.
        memory_bytes: most data of a rank's process, kept by the kernel; None: as much as this one.

    Raises ConfigError if there is no such command.
    """
    env = dict(os.environ if env is None else env)
    check_command(command, env)
    output = None if on_line is None else subprocess.PIPE
    processes, readers = [], []
    try:
        for rank in range(network.spec.world_size):
            process = network.popen(
                network.spec.node(rank), command, env | environment(network, rank, port), stdin=subprocess.DEVNULL,
                stdout=output, stderr=None if output is None else subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
            processes.append(process)
            if memory_bytes is not None:
                # Before the command begins: what enters the node takes milliseconds.
                _, most = resource.prlimit(process.pid, resource.RLIMIT_DATA)
                resource.prlimit(process.pid, resource.RLIMIT_DATA, (memory_bytes, most))
            if on_line is not None:
                readers.append(threading.Thread(target=read_lines, args=(process, rank, on_line), daemon=True))
                readers[-1].start()
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        raise
    return Job(processes, readers, grace_s)


def read_lines(process: subprocess.Popen[str], rank: int, on_line: OnLine) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            on_line(rank, line.rstrip("\n"))


def threads_per_rank(spec: LabSpec, env: Mapping[str, str]) -> tuple[int, str]:
    """Compute threads of one rank, and the reason: OMP_NUM_THREADS if it is set, else an equal share of the cores."""
    stated = env.get("OMP_NUM_THREADS", "")
    if stated.isdigit() and int(stated) > 0:
        return int(stated), "was set"
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // spec.world_size), f"{cores} cores shared by {spec.world_size} rank(s)"


def check_command(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise ConfigError if the command's program does not exist."""
    if not command:
        raise ConfigError("no command to run: give one after --, such as: -- python train.py")
    if shutil.which(command[0], path=env.get("PATH")) is None:
        if Path(command[0]).is_file():
            raise ConfigError(f"command {command[0]!r} is not executable: chmod +x it, or name its interpreter first")
        raise ConfigError(f"command {command[0]!r} was not found, neither as a file nor on PATH")
