"""Runs the islands of one machine; each has its own process group and its own launcher."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from thinwire.collectives import host_meeting
from thinwire.collectives.elastic import BEGUN
from thinwire.errors import ConfigError, Problems, ThinwireError, UnsavedError
from thinwire.launch.agent import await_node_0, run_workers
from thinwire.launch.fork_server import Forked, ForkServer
from thinwire.launch.start import Start
from thinwire.run.config import TrainConfig
from thinwire.run.place import IslandPlace
from thinwire.run.run import island_size
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import read_toml, to_toml
from thinwire.run.signals import STOPPING, StoppedError

POLL_S = 0.1
CONNECT_S = 5.0
# Exit code of an island that has finished but could not save the end: starting it again would not help.
UNSAVED = 3
FINISHED = {0, UNSAVED}


class Children:
    """The launchers of this machine's islands; all signals are forwarded to them.

    restarts: how often each may be started again. server: starts them.
    """

    def __init__(self, restarts: int, server: ForkServer) -> None:
        self.restarts = restarts
        self._server = server
        self.running: dict[int, Forked] = {}
        self._again: dict[int, tuple[list[str], Path | None]] = {}
        self._num_restarts: dict[int, int] = {}
        self.received: int | None = None
        for signum in STOPPING:
            signal.signal(signum, self._handle)

    def start(self, number: int, command: list[str], again: list[str], log: Path | None) -> None:
        """Start an island. again: the command that starts it after a failure. log: file for its output.

        None: this process's.
        """
        self._again[number] = again, log
        with nullcontext() if log is None else log.open("a") as output:
            self.running[number] = self._server.start(command, os.environ, output)

    def is_first_time(self, number: int) -> bool:
        """Whether the island has not been started again yet."""
        return number not in self._num_restarts

    def start_again(self, number: int, code: int) -> None:
        """Start an island again that failed with this exit code, if allowed; it then joins the others."""
        done, failed = self._num_restarts.get(number, 0), f"thinwire: island {number} failed with exit code {code}"
        if done >= self.restarts:
            print(f"{failed}, and is not started again; the others go on", file=sys.stderr)
            return
        self._num_restarts[number] = done + 1
        print(f"{failed}, and is started again ({done + 1} of {self.restarts}); the others go on", file=sys.stderr)
        again, log = self._again[number]
        self.start(number, again, again, log)

    def send(self, signum: int) -> None:
        for child in self.running.values():
            with suppress(ProcessLookupError):
                child.send_signal(signum)

    def ended(self) -> dict[int, int]:
        """Exit codes, in the shell's form, of the islands that have ended since the last call."""
        codes = {number: code for number, child in self.running.items() if (code := child.poll()) is not None}
        for number in codes:
            del self.running[number]
        return {number: 128 - code if code < 0 else code for number, code in codes.items()}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        self.send(signum)


def launch_islands(config: TrainConfig, start: Start, server: ForkServer) -> int:
    """Run this machine's islands to their end. Return the worst exit code. Raises StoppedError after a signal."""
    children = Children(config.restarts, server)
    size = island_size(config)
    here, count = config.workers // size, config.world_size // size
    host, _, port = (config.join or "127.0.0.1:0").rpartition(":")
    if config.node == 0:
        meeting = host_meeting(int(port))
    else:
        await_node_0(host, int(port), config.timeout)
        meeting = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=config.timeout))
    meet = f"{host}:{meeting.port}"
    numbers = range(config.node * here, (config.node + 1) * here)
    for number in numbers:
        run_dir = RunDir(config.run_dir).island(number)
        if number:
            own = replace(config, run_dir=str(run_dir.path))
            run_dir.claim(0, to_toml(own), overwrite=config.overwrite)
        island = IslandPlace(number, count, meet)
        command = ["thinwire.launch.islands", str(run_dir.config())]
        # The first one here has the terminal.
        log = run_dir.logs / "launcher.out" if number > numbers[0] else None
        # Faults are asked for once.
        own_start = replace(start, island=island, first_gpu=(number - numbers[0]) * size)
        first, again = (replace(own_start, inject=inject).to_json() for inject in (start.inject, ()))
        children.start(number, [*command, first], [*command, again], log)
    return watch(children, meeting)


def watch(children: Children, meeting: dist.TCPStore) -> int:
    """Wait until all have ended. A failure before the islands have met ends all.

    A later one starts the island again.
    """
    codes: dict[int, int] = {}
    while children.running:
        for number, code in children.ended().items():
            codes[number] = code
            if code in FINISHED or children.received is not None:
                continue
            try:
                has_begun = meeting.check([BEGUN])
            except dist.DistError:
                print(f"thinwire: island {number} failed, and nobody answers at the meeting any more", file=sys.stderr)
                continue
            if not has_begun:
                print(f"thinwire: island {number} failed before the islands had met: all stop", file=sys.stderr)
                children.send(signal.SIGTERM)
            elif not FINISHED.isdisjoint(codes.values()):
                # An island that comes back after the others have finished finds nobody.
                if not children.is_first_time(number):
                    codes[number] = 0
                    print(f"thinwire: island {number} came back when the others had finished, and ends", flush=True)
            elif code != ConfigError.exit_code or not children.is_first_time(number):
                # An island that comes back too early finds its number taken by old workers that have not left yet.
                children.start_again(number, code)
        time.sleep(POLL_S)
    if children.received is not None:
        raise StoppedError(children.received)
    return max(1 if code == UNSAVED else code for code in codes.values())


def follow_command(island: IslandPlace) -> None:
    """End this process, an island's launcher, if the command that started it is gone.

    If the meeting is gone too, all islands stop, as on SIGTERM. If the meeting still answers, another machine hosts it,
    and only this island leaves.
    """
    parent = os.getppid()
    host, _, port = island.meet.rpartition(":")

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        told = f"thinwire: island {island.number}: the command that started it is gone"
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except OSError:
            print(f"{told}: all islands stop", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            print(f"{told}: it leaves the others", file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=look, name="thinwire-parent", daemon=True).start()


def main() -> NoReturn:
    """One island's launcher, with CONFIG.toml and START as arguments; started by `launch_islands`."""
    config_path, told = sys.argv[1:]
    start, problems = Start.from_json(told), Problems()
    assert start.island is not None
    # Before there is a thread.
    server = ForkServer()
    follow_command(start.island)
    try:
        config = read_toml(Path(config_path), problems)
        problems.raise_any()
        assert config.local_size is not None
        alone = replace(config, workers=config.local_size, nodes=1, node=0, join=None, stop_at=start.stop_at)
        with server:
            code = run_workers(alone, start, server)
    except ThinwireError as error:
        if not isinstance(error, StoppedError):
            print(f"thinwire: island {start.island.number}: {error}", file=sys.stderr)
        code = UNSAVED if isinstance(error, UnsavedError) else error.exit_code
    sys.exit(code)
