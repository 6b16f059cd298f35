"""Starts a training run from its configuration: with workers of this machine, or as one of torchrun's workers."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from thinwire.errors import ConfigError, Problems
from thinwire.flags import Stated
from thinwire.hosts.offload.room import give_pages_back
from thinwire.launch.agent import LOOPBACK, Relay, run_workers
from thinwire.launch.fork_server import ForkServer
from thinwire.launch.islands import launch_islands
from thinwire.launch.line import configured
from thinwire.launch.machine import interface_towards, process_age_s
from thinwire.launch.prepare import dry_run, of_other_rank, prepare
from thinwire.launch.stages import launch_stages, watch_stage
from thinwire.launch.start import Start
from thinwire.launch.worker import exit_after
from thinwire.run.config import TrainConfig
from thinwire.run.place import ProcessPlace
from thinwire.run.run import Run, recovers


def train(stated: Stated, problems: Problems) -> int:
    """Train as the values of a command line say. Return the exit code. Raises ConfigError with all problems at once."""
    began = time.time() - process_age_s()
    config = configured(stated, problems)
    place = ProcessPlace.from_environment()
    if config.dry_run:
        return dry_run(config, problems) if place is None or place.rank == 0 else 0
    if config.memory is not None:
        # Before torch allocates anything.
        give_pages_back()
    if place is None:
        return launch(config, problems, began)
    if config.model == "auto":
        raise ConfigError("--model auto: torchrun's workers would choose for themselves; nearest: --model demo")
    asked, config = config.workers, replace(config, workers=place.world_size, nodes=1, node=0, join=None)
    if recovers(config):
        return stage(config, problems, place)
    if place.rank:
        # Rank 0 alone checks and prepares: one error is said once.
        exit_after(Run.of(of_other_rank(config)), place, None, trace=False)
    run, start = prepare(config, problems)
    if asked not in (1, place.world_size):
        start.effects.append((f"--workers {asked}", f"{place.world_size}", "torchrun started them"))
    exit_after(run, place, start, trace=False)


def stage(config: TrainConfig, problems: Problems, place: ProcessPlace) -> int:
    """Watch over the worker for whose place this process was started. Rank 0 checks and prepares the run."""
    with ForkServer("thinwire.launch.preload") as server:
        start = Start(stop_at=config.stop_at, inject=config.inject, allow_resume_drift=config.allow_resume_drift)
        if place.rank == 0:
            run, start = prepare(config, problems)
            config = run.config
        else:
            config = of_other_rank(config)
        return watch_stage(config, start, server, place)


def launch(config: TrainConfig, problems: Problems, began: float) -> int:
    """Run the configuration with its workers on this machine. Return the exit code.

    began: when the command was started, as time.time(). Raises ConfigError before any process is started, ThinwireError
    if a worker failed, StoppedError after a signal.
    """
    with ForkServer("thinwire.launch.preload") as server:
        relay = Relay()
        run, start = prepare(config, problems)
        if config.nodes == 1:
            start = replace(start, began=began)
        os.environ["OMP_NUM_THREADS"] = str(start.threads)
        start.effects.append(choose_interface((config.join or LOOPBACK).rsplit(":", 1)[0], config.nodes))
        if run.recovers:
            return launch_stages(run.config, start, server)
        if run.has_islands and (run.config.local_size or 1) < config.world_size:
            return launch_islands(run.config, start, server)
        return run_workers(run.config, start, server, relay)


def choose_interface(host: str, num_nodes: int) -> tuple[str, str, str]:
    """Tell gloo which network interface reaches `host`. Return the row that says so."""
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
