"""Starts the workers of this machine through torchrun's elastic agent, and ends when they have ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from thinwire._compat.elastic import agent_starts_by
from thinwire.errors import ThinwireError
from thinwire.launch.failures import failure, has_failed_by_itself
from thinwire.launch.fork_server import ForkServer
from thinwire.launch.machine import free_port
from thinwire.launch.start import Start
from thinwire.methods.pipeline.recover import FEWEST_STAGES
from thinwire.run.config import TrainConfig
from thinwire.run.places import residency_options
from thinwire.run.run_dir import RunDir
from thinwire.run.signals import STOPPING, StoppedError

LOOPBACK = "127.0.0.1"
LOOK_EVERY_S = 0.2
CLOCK = "%Y-%m-%d %H:%M:%S"


class RankLogs(LogsSpecs):
    """RUN_DIR/logs: each machine's first worker writes to the terminal, everything else goes to rankN.log.

    `before_start` is called when all machines have met, right before the workers start.
    """

    def __init__(self, folder: Path, before_start: Callable[[], None]) -> None:
        super().__init__(str(folder))
        self._before_start = before_start

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._before_start()
        dest = LogsDest()
        for local_rank, env in envs.items():
            path = Path(self.root_log_dir) / f"rank{env['RANK']}"
            error_file = path.with_suffix(".error.json")
            error_file.unlink(missing_ok=True)
            env["TORCHELASTIC_ERROR_FILE"] = dest.error_files[local_rank] = str(error_file)
            dest.stderrs[local_rank] = str(path.with_suffix(".log"))
            dest.stdouts[local_rank] = "" if local_rank == 0 else str(path.with_suffix(".out"))
        return dest


class Relay:
    """Forwards SIGINT and SIGTERM to the workers, which stop after the current step; a second signal kills them."""

    def __init__(self) -> None:
        self.agent: LocalElasticAgent | None = None
        self.received: int | None = None
        self.listen()

    def listen(self) -> None:
        for signum in STOPPING:
            signal.signal(signum, self._handle)

    def step_aside(self) -> None:
        """Let signals end this process at once, while it waits for another machine and has no worker."""
        for signum in STOPPING:
            signal.signal(signum, signal.SIG_DFL)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        again, self.received = self.received is not None, signum
        pids = [worker.id for worker in self.agent.get_worker_group().workers] if self.agent else []
        if not any(pids):
            raise StoppedError(signum)
        for pid in filter(None, pids):
            try:
                os.kill(pid, signal.SIGKILL if again else signum)
            except ProcessLookupError:
                continue


def run_workers(config: TrainConfig, start: Start, server: ForkServer, relay: Relay | None = None) -> int:
    """Run a prepared configuration with its workers on this machine; see `launch`. Return the exit code.

    server: starts the workers.
    """
    relay = relay or Relay()
    host, port = (config.join or f"{LOOPBACK}:{free_port()}").rsplit(":", 1)
    run_dir = RunDir(config.run_dir)
    # The agent would handle SIGINT, SIGTERM and SIGHUP itself and kill the workers after 30 s; they stay ours.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    keep_log(run_dir.logs / f"launcher{config.node}.log")
    relay.agent = make_agent(config, f"{host}:{port}", start, relay.listen)
    if config.node > 0:
        await_node_0(host, int(port), config.timeout)
    relay.step_aside()
    try:
        with agent_starts_by(server.start), passing_on(run_dir.faults):
            result = relay.agent.run()
    except (ConnectionError, TimeoutError, RuntimeError) as error:
        raise ThinwireError(
            f"node {config.node} did not meet the others at {host}:{port} within {config.timeout:g} s: {error}"
        ) from error
    finally:
        # The live table hides the cursor, and a killed worker can't bring it back.
        Console().show_cursor()
    stated = residency_options(config)
    why = partial(
        failure, run_dir=run_dir, timeout_s=config.timeout, injected=start.inject, memory=stated.get("memory"),
        durable=bool(stated.get("durable")),
    )  # fmt: skip
    if relay.received is not None:
        if own := {rank: one for rank, one in result.failures.items() if has_failed_by_itself(one)}:
            whose = f"island {start.island.number}: " if start.island else ""
            print(f"thinwire: {whose}{why(own)}", file=sys.stderr)
        raise StoppedError(relay.received)
    if result.is_failed():
        can_recover = config.mesh_shape.pipeline >= FEWEST_STAGES
        advice = "--pipeline.recover average goes on without a stage" if can_recover else ""
        raise why(result.failures, is_island=start.island is not None, advice=advice)
    return 0


@contextmanager
def passing_on(path: Path) -> Iterator[None]:
    """Show on the terminal what workers without a terminal append to this file."""
    seen, is_over = path.stat().st_size if path.exists() else 0, threading.Event()

    def look() -> None:
        nonlocal seen
        with suppress(FileNotFoundError), path.open() as log:
            log.seek(seen)
            sys.stderr.write(log.read())
            seen = log.tell()

    def follow() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            look()

    follower = threading.Thread(target=follow, name="thinwire-faults", daemon=True)
    follower.start()
    try:
        yield
    finally:
        is_over.set()
        follower.join()
        look()


def await_node_0(host: str, port: int, timeout_s: float) -> None:
    """Wait until node 0 answers. Raises ThinwireError after `timeout_s` seconds."""
    print(f"waiting for node 0 at {host}:{port}, at most {timeout_s:g} s ...", flush=True)
    due = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError as error:
            if time.monotonic() > due:
                raise ThinwireError(f"node 0 did not answer at {host}:{port} within {timeout_s:g} s: {error}") from None
        time.sleep(0.2)


def make_agent(config: TrainConfig, endpoint: str, start: Start, before_start: Callable[[], None]) -> LocalElasticAgent:
    """torchrun's agent for this machine's workers; a failed worker ends the run."""
    run_dir = RunDir(config.run_dir)
    timeout_s = max(1, round(config.timeout))
    rendezvous = RendezvousParameters(
        backend="static", endpoint=endpoint, run_id="thinwire" if config.join else uuid.uuid4().hex,
        min_nodes=config.nodes, max_nodes=config.nodes, rank=config.node, timeout=timeout_s,
    )  # fmt: skip
    address, port = endpoint.rsplit(":", 1)
    spec = WorkerSpec(
        role="worker", local_world_size=config.workers, entrypoint="thinwire.launch.worker",
        args=(str(run_dir.config(config.node)), start.to_json()),
        rdzv_handler=get_rendezvous_handler(rendezvous), max_restarts=0, monitor_interval=0.1,
        master_addr=address, master_port=int(port),
    )  # fmt: skip
    return LocalElasticAgent(spec, RankLogs(run_dir.logs, before_start), exit_barrier_timeout=timeout_s)


def keep_log(path: Path) -> None:
    """Write the agent's own messages to a file; the user sees thinwire's messages."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(path, mode="w", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", CLOCK))
    logger.handlers[:] = [handler]
    logger.propagate = False
