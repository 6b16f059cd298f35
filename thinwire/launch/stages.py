"""Runs a pipeline that survives the loss of stages: starts killed workers again."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from thinwire.collectives import host_meeting
from thinwire.collectives.incarnations import connect, end, is_awaited, watched
from thinwire.launch.agent import LOOPBACK, await_node_0, passing_on
from thinwire.launch.failures import failure
from thinwire.launch.fork_server import Forked, ForkServer
from thinwire.launch.start import Start
from thinwire.run.config import TrainConfig
from thinwire.run.place import ProcessPlace
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import to_toml
from thinwire.run.signals import STOPPING, StoppedError

POLL_S = 0.1
# Of the timeout. A rank that lives may itself wait for one that is lost, for all of the timeout from the moment on at
# which another has given up and come to the meeting.
PATIENCE = 1.5


def launch_stages(config: TrainConfig, start: Start, server: ForkServer) -> int:
    """Run this machine's workers to their end, as the launcher of `thinwire train`; see `Watch.run`."""
    host, _, port = (config.join or f"{LOOPBACK}:0").rpartition(":")
    if config.node == 0:
        store = host_meeting(int(port))
    else:
        await_node_0(host, int(port), config.timeout)
        store = connect(config.join or "", config.timeout)
    own = range(config.node * config.workers, (config.node + 1) * config.workers)
    places = [ProcessPlace(rank, rank - own[0], config.world_size) for rank in own]
    folder = RunDir(config.run_dir).logs
    return Watch(config, start, server, store, f"{host}:{store.port}", config.workers, folder).run(places)


def watch_stage(config: TrainConfig, start: Start, server: ForkServer, place: ProcessPlace) -> int:
    """Run the worker for whose place torchrun, or a launcher that sets the same variables, started this process."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_store or place.rank:
        store = connect(f"{host}:{port}", config.timeout)
    else:
        store = host_meeting(port)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Watch(config, start, server, store, f"{host}:{port}", local_size, None).run([place])


class Watch:
    """The workers of one launcher. A worker that a signal has killed is started again, at most `config.restarts` times.

    A worker that does not come to a meeting where others wait, for PATIENCE times the timeout, counts as hung and is
    killed.

    Args:
        store: in which the ranks meet, at address `meet`.
        local_size: workers of this machine.
        logs: folder for the workers' output; None: this process's output.
    """

    def __init__(
        self, config: TrainConfig, start: Start, server: ForkServer, store: dist.TCPStore, meet: str, local_size: int,
        logs: Path | None,
    ) -> None:  # fmt: skip
        self.config, self.start, self._server, self._store = config, replace(start, meet=meet), server, store
        self._local_size, self._logs = local_size, logs
        self._running: dict[ProcessPlace, Forked] = {}
        self._num_restarts: dict[ProcessPlace, int] = {}
        self._received: int | None = None
        # Of each worker, the incarnation that it has not come to, and since when.
        self._awaited: dict[ProcessPlace, tuple[int, float]] = {}
        self._errors = Path(tempfile.mkdtemp(prefix="thinwire-"))

    def run(self, places: Sequence[ProcessPlace]) -> int:
        """Start the workers and wait for their end. Return 0.

        Raises ThinwireError with the first cause of a failure.
        """
        for signum in STOPPING:
            signal.signal(signum, self._handle)
        run_dir, failures = RunDir(self.config.run_dir), dict[int, ProcessFailure]()
        with ExitStack() as held:
            held.callback(shutil.rmtree, self._errors, ignore_errors=True)
            if self._logs is not None:
                held.enter_context(passing_on(run_dir.faults))
            for place in places:
                self._launch(place)
            while self._running:
                for place, worker in list(self._running.items()):
                    code = worker.poll()
                    if code is not None:
                        del self._running[place]
                    if code and not self._starts_again(place, worker.pid, code):
                        failures[place.rank] = self._failure(place, worker.pid, code)
                with suppress(dist.DistError):
                    self._watch()
                time.sleep(POLL_S)
        if self._received is not None:
            raise StoppedError(self._received)
        if failures:
            raise failure(failures, run_dir, self.config.timeout, self.start.inject)
        return 0

    def _launch(self, place: ProcessPlace) -> None:
        again = self._num_restarts.get(place, 0)
        self._awaited.pop(place, None)
        host, _, port = self.start.meet.rpartition(":")
        numbers = {
            "RANK": place.rank, "LOCAL_RANK": place.local_rank, "WORLD_SIZE": place.world_size,
            "LOCAL_WORLD_SIZE": self._local_size, "GROUP_RANK": self.config.node, "MASTER_ADDR": host,
            "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": again,
        }  # fmt: skip
        env = os.environ | {name: str(value) for name, value in numbers.items()}
        env["TORCHELASTIC_ERROR_FILE"] = str(self._error_file(place))
        with suppress(FileNotFoundError):
            self._error_file(place).unlink()
        # Faults are asked for once.
        start = replace(self.start, inject=() if again else self.start.inject)
        words = ["thinwire.launch.worker", to_toml(self.config), start.to_json()]
        with ExitStack() as files:
            out, err = (
                files.enter_context((self._logs / f"rank{place.rank}{suffix}").open("a")) if self._logs else None
                for suffix in (".out", ".log")
            )
            # The first one has the terminal.
            self._running[place] = self._server.start(words, env, out if place.local_rank else None, err)

    def _watch(self) -> None:
        """Report that the workers run. Kill those that hang while others wait for them."""
        now = time.monotonic()
        for place, worker in self._running.items():
            watched(self._store, place.rank)
            number, is_missing = is_awaited(self._store, place.rank)
            before, since = self._awaited.get(place, (-1, now))
            if not is_missing or number != before:
                self._awaited[place] = number, now
            elif now > since + PATIENCE * self.config.timeout:
                print(f"thinwire: rank {place.rank} (pid {worker.pid}) has hung, and is ended", file=sys.stderr)
                worker.send_signal(signal.SIGKILL)
                self._awaited[place] = number, now

    def _starts_again(self, place: ProcessPlace, pid: int, code: int) -> bool:
        """Start a killed worker again. If that is not allowed, end the others."""
        done, name = self._num_restarts.get(place, 0), f"thinwire: rank {place.rank} (pid {pid})"
        if self._received is None and code < 0 and done < self.config.restarts:
            self._num_restarts[place] = done + 1
            how = f"was killed by {signal.Signals(-code).name}, and is started again"
            print(f"{name} {how} ({done + 1} of {self.config.restarts})", file=sys.stderr, flush=True)
            self._launch(place)
            return True
        with suppress(dist.DistError):
            end(self._store, f"rank {place.rank} has failed, and is not started again")
        return False

    def _failure(self, place: ProcessPlace, pid: int, code: int) -> ProcessFailure:
        return ProcessFailure(place.local_rank, pid, code, str(self._error_file(place)))

    def _error_file(self, place: ProcessPlace) -> Path:
        return self._errors / f"rank{place.rank}.json"

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        again, self._received = self._received is not None, signum
        for worker in self._running.values():
            with suppress(ProcessLookupError):
                worker.send_signal(signal.SIGKILL if again else signum)
