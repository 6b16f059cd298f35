"""Starts the workers of this machine through torchrun's elastic agent, and ends when they have ended."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from thinwire.checkpoint import latest, step_of
from thinwire.collectives import faults
from thinwire.errors import ConfigError, ThinwireError, UnsavedError
from thinwire.training.config import TrainConfig
from thinwire.training.hardware import free_port, interface_towards
from thinwire.training.islands import launch_islands
from thinwire.training.metrics import read_metrics
from thinwire.training.prepare import Start, prepare
from thinwire.training.problems import Problems
from thinwire.training.run_dir import RunDir
from thinwire.training.settings import has_islands, island_size
from thinwire.training.signals import STOPPING, StoppedError

# Half of the time that torchrun's agent gives workers between asking them to end and killing them.
AGENT_PATIENCE_S = 15
LOOPBACK = "127.0.0.1"
LOOK_EVERY_S = 0.2
# Errors whose message says it all.
SAID_PLAINLY = ("ConfigError", "CheckpointError", "PeerLostError", "ThinwireError", "UnsavedError")


class RankLogs(LogsSpecs):
    """RUN_DIR/logs: rank 0 keeps the terminal as its output, everything else goes to rankN.log.

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
            dest.stdouts[local_rank] = "" if env["RANK"] == "0" else str(path.with_suffix(".out"))
        return dest


class Relay:
    """Passes SIGINT and SIGTERM on to the workers, who stop after the current step; the second one kills them."""

    def __init__(self) -> None:
        self.agent: LocalElasticAgent | None = None
        self.received: int | None = None
        self.listen()

    def listen(self) -> None:
        for signum in STOPPING:
            signal.signal(signum, self._handle)

    def step_aside(self) -> None:
        """Let signals end the process at once: no handler would run while it waits for another machine to answer."""
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


def launch(config: TrainConfig, problems: Problems) -> int:
    """Run the configuration with its workers on this machine; returns the exit code.

    Raises ConfigError before any process is started, ThinwireError when a worker failed, StoppedError after a signal.
    """
    relay = Relay()
    config, start = prepare(config, problems)
    os.environ["OMP_NUM_THREADS"] = str(start.threads)
    start.effects.append(choose_interface((config.join or LOOPBACK).rsplit(":", 1)[0], config.nodes))
    if has_islands(config.strategy) and island_size(config) < config.world_size:
        return launch_islands(config, start)
    return run_workers(config, start, relay)


def run_workers(config: TrainConfig, start: Start, relay: Relay | None = None) -> int:
    """Run a configuration that has been prepared, with its workers on this machine; see `launch`."""
    relay = relay or Relay()
    host, port = (config.join or f"{LOOPBACK}:{free_port()}").rsplit(":", 1)
    run_dir = RunDir(config.run_dir)
    # SIGINT and SIGTERM stay ours, and nohup's SIGHUP ignored: the agent would take them over and kill after 30 s.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    keep_log(run_dir.logs / f"launcher{config.node}.log")
    relay.agent = make_agent(config, f"{host}:{port}", start, relay.listen)
    if config.node > 0:
        await_node_0(host, int(port), config.timeout)
    relay.step_aside()
    try:
        with passing_on(run_dir.faults) if start.inject else nullcontext():
            result = relay.agent.run()
    except (ConnectionError, TimeoutError, RuntimeError) as error:
        raise ThinwireError(
            f"node {config.node} did not meet the others at {host}:{port} within {config.timeout:g} s: {error}"
        ) from error
    finally:
        # The live table hides it, and a killed worker can't bring it back.
        Console().show_cursor()
    if relay.received is not None:
        if own := {rank: one for rank, one in result.failures.items() if has_failed_by_itself(one)}:
            whose = f"island {start.island.number}: " if start.island else ""
            print(f"thinwire: {whose}{failure(own, run_dir, start.inject)}", file=sys.stderr)
        raise StoppedError(relay.received)
    if result.is_failed():
        raise failure(result.failures, run_dir, start.inject)
    return 0


@contextmanager
def passing_on(path: Path) -> Iterator[None]:
    """Inside, what workers append to this file is shown on the terminal, which they don't have."""
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
    """Return when node 0 answers; raises ThinwireError after `timeout_s` seconds."""
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
        role="worker", local_world_size=config.workers, entrypoint=sys.executable,
        args=("-u", "-m", "thinwire.training.worker", str(run_dir.config(config.node)), start.to_json()),
        rdzv_handler=get_rendezvous_handler(rendezvous), max_restarts=0, monitor_interval=0.1,
        master_addr=address, master_port=int(port),
    )  # fmt: skip
    return LocalElasticAgent(spec, RankLogs(run_dir.logs, before_start), exit_barrier_timeout=timeout_s)


def choose_interface(host: str, num_nodes: int) -> tuple[str, str, str]:
    """Tell gloo which network interface leads to `host`; the row that says so."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return "network interface", os.environ["GLOO_SOCKET_IFNAME"], "GLOO_SOCKET_IFNAME is set"
    found = interface_towards(host)
    if found is None:
        return "network interface", "gloo's choice", f"none found that leads to {host}"
    name, address = found
    os.environ["GLOO_SOCKET_IFNAME"] = name
    reason = f"leads to {host}"
    if num_nodes > 1 and address.startswith("127."):
        reason += ", which is this machine itself: others can't reach it; give node 0's address on the network"
    return "network interface", f"{name} ({address})", reason


def keep_log(path: Path) -> None:
    """Send the agent's own messages to a file: what matters of them is said in our words."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.handlers[:] = [logging.FileHandler(path, mode="w", delay=True)]
    logger.propagate = False


def failure(failures: Mapping[int, ProcessFailure], run_dir: RunDir, injected: Sequence[str] = ()) -> ThinwireError:
    """One short message on why the run failed: the first cause, and what is left."""
    first_report = min((f.timestamp for f in failures.values() if not is_killed(f)), default=math.inf)
    rank, cause = min(failures.items(), key=lambda item: closeness_to_cause(item[1], first_report))
    records = read_metrics(run_dir.metrics)
    what = explain(rank, cause, injected)
    if cause.exitcode == ConfigError.exit_code:
        return ConfigError(what)
    steps = f"{len(records)} steps are in {run_dir.metrics}" if records else "no step was finished"
    saved = step_of(latest(run_dir.checkpoints))
    resume = f"--resume goes on after step {saved}" if saved else "there is no checkpoint yet to --resume from"
    kind = UnsavedError if is_unsaved(cause) else ThinwireError
    return kind(f"{what}\n{steps}; {resume}; details are in {run_dir.logs}")


def explain(rank: int, cause: ProcessFailure, injected: Sequence[str] = ()) -> str:
    if is_killed(cause):
        asked = ", or as --inject asks" if any(faults.parse(text).kind == "kill" for text in injected) else ""
        by_whom = f" (by hand, or by the system for want of memory{asked})"
        hint = by_whom if cause.exitcode == -signal.SIGKILL else ""
        return f"rank {rank} (pid {cause.pid}) was killed by {cause.signal_name()}{hint}; the others stopped"
    message = cause.message["message"] if isinstance(cause.message, dict) else cause.message
    kind, _, text = str(message).partition(": ")
    return f"rank {rank}: {text if kind in SAID_PLAINLY else message}"


def is_unsaved(cause: ProcessFailure) -> bool:
    """Whether the run had come to its end, and could not write what it leaves."""
    message = cause.message["message"] if isinstance(cause.message, dict) else cause.message
    return str(message).startswith("UnsavedError: ")


def is_killed(cause: ProcessFailure) -> bool:
    """Whether a signal ended it that the agent did not send itself while closing."""
    return cause.exitcode < 0 and cause.exitcode != -signal.SIGTERM


def has_failed_by_itself(failure: ProcessFailure) -> bool:
    """Whether neither a signal has ended it nor the loss of another."""
    return failure.exitcode > 0 and "PeerLostError" not in str(failure.message)


def closeness_to_cause(failure: ProcessFailure, first_report: float) -> tuple[bool, bool, int]:
    """Sorts first the failure that others follow from: a killed process, then any error but a lost peer.

    The agent itself kills a worker that is frozen, long after the others have reported it.
    """
    is_cause = is_killed(failure) and failure.timestamp < first_report + AGENT_PATIENCE_S
    return not is_cause, "PeerLostError" in str(failure.message), failure.timestamp
