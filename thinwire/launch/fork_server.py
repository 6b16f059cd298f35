"""Starts processes quickly: forks them from a copy of this process that has loaded everything they need."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from thinwire.errors import ThinwireError

LOOK_EVERY_S = 0.02


class ForkServer:
    """A copy of this process that forks others on request. A new interpreter would spend seconds on importing torch.

    Make it before this process computes or starts a thread: a fork has its parent's memory but none of its threads. The
    copy has a session of its own, so a terminal's Ctrl-C does not reach it. It ends when it is closed or when this
    process dies.

    preload: a module that only the copy imports, while this process continues.
    """

    def __init__(self, preload: str | None = None) -> None:
        self._requests, theirs = socket.socketpair()
        self._replies = self._requests.makefile("rb")
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._close()
            _serve(theirs, preload)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _close(self) -> None:
        self._replies.close()
        self._requests.close()

    def start(
        self, words: Sequence[str], env: Mapping[str, str], stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
    ) -> Forked:  # fmt: skip
        """Call `main()` of the module `words[0]` with the other words as arguments, in a new process and session.

        stdout, stderr: files for its output; None: those of this process.
        """
        outputs = [1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
        return Forked(self, self.ask(("start", list(words), dict(env)), outputs))

    def ask(self, request: tuple, outputs: Sequence[int] = ()) -> Any:
        """The copy's answer. Raises ThinwireError if the copy is gone."""
        content = pickle.dumps(request)
        try:
            socket.send_fds(self._requests, [len(content).to_bytes(8, "big")], list(outputs))
            self._requests.sendall(content)
            return pickle.load(self._replies)
        except (EOFError, ConnectionError):
            raise ThinwireError(f"the process that starts workers (pid {self._pid}) was killed") from None


class Forked:
    """A process that a ForkServer has forked, with the interface of a Popen."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative after a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask(("poll", self.pid))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        due = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > due:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(LOOK_EVERY_S)
        return code

    def send_signal(self, signum: int) -> None:
        """Send it a signal, if it still runs."""
        if self.returncode is None:
            os.kill(self.pid, signum)


def _serve(requests: socket.socket, preload: str | None) -> NoReturn:
    """Answer requests until the other end is closed."""
    os.setsid()
    if preload is not None:
        import_module(preload)
    # The collector would write to every object, and so copy the memory that forks share.
    gc.freeze()
    while True:
        head, files, _, _ = socket.recv_fds(requests, 8, 2)
        if not head:
            os._exit(0)
        kind, *request = pickle.loads(requests.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        reply = _start(requests, files, *request) if kind == "start" else _poll(*request)
        requests.sendall(pickle.dumps(reply))


def _poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _start(requests: socket.socket, files: list[int], words: list[str], env: dict[str, str]) -> int:
    # Its group exists when the caller knows its number, as that of a Popen: it may be sent a signal.
    has_group, group = os.pipe()
    pid = os.fork()
    if pid == 0:
        requests.close()
        os.setsid()
        os.close(has_group)
        os.close(group)
        _become(files, words, env)
    os.close(group)
    os.read(has_group, 1)
    for file in (has_group, *files):
        os.close(file)
    return pid


def _become(files: list[int], words: list[str], env: dict[str, str]) -> NoReturn:
    """Turn this process into what `python -u -m MODULE ARGUMENTS` would be."""
    code: Any = 0
    with suppress(OSError):
        # The command line is that of the launcher: this is what ps and top tell workers by.
        Path("/proc/self/comm").write_text(f"thinwire rank {env['RANK']}" if "RANK" in env else "thinwire")
    try:
        for number, file in enumerate(files, start=1):
            os.dup2(file, number)
            os.close(file)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(env)
        sys.argv = list(words)
        import_module(words[0]).main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0 if isinstance(code, int | None) else 1)
