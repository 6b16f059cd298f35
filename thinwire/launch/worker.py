"""One worker process: joins the others, trains, and leaves without hanging."""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TextIO

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from thinwire.collectives import host_meeting
from thinwire.errors import Problems, ThinwireError
from thinwire.launch.start import Start
from thinwire.training.config import with_derived
from thinwire.training.gathering import gather
from thinwire.training.hardware import threads_per_worker
from thinwire.training.place import Island, Place
from thinwire.training.run import Run, island_size
from thinwire.training.run_dir import RunDir
from thinwire.training.settings import read_toml, to_toml
from thinwire.training.signals import StopFlag
from thinwire.training.trainer import Trainer


def work(run: Run, place: Place, start: Start | None) -> int:
    """Train as one rank; returns the signal that asked this process to stop, or 0.

    start: what was found out before the workers were started; known at least on rank 0.
    """
    torch.set_num_threads(threads_per_worker(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))[0])
    run = replace(run, config=with_derived(run.config)).with_island_size()
    run, place, start, held = join_world(run, place, start or Start())
    # Only now: SIGTERM must end a worker that still waits for others, who may never come.
    stop = StopFlag(is_replaced=start.island is not None)
    trainer = Trainer(run, place, stop, start.dtype, start.effects)
    try:
        trainer.run()
    except BaseException:
        trainer.optimizer.abandon()
        raise
    finally:
        if trainer.reporter is not None:
            trainer.reporter.close()
    dist.destroy_process_group()
    del held
    return stop.signum


def join_world(run: Run, place: Place, start: Start) -> tuple[Run, Place, Start, object]:
    """Make the default process group: all ranks, or those of this one's island.

    Returns the run, the place, what was found out, and an object to hold for as long as others may still meet here.
    """
    config = run.config
    timeout = timedelta(seconds=config.timeout)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    gather(store, place.rank, place.world_size, None, "its start")
    size = island_size(config) if run.has_islands else place.world_size
    if start.island is not None or size == place.world_size:
        join_group(store, place.rank, place.world_size, timeout)
        return run, replace(place, island=start.island or Island()), start, None
    number, rank = divmod(place.rank, size)
    meeting = host_meeting() if place.rank == 0 else None
    if meeting is not None:
        # Only rank 0 knows which dtype is fast, and all islands must compute in the same one.
        store.set("thinwire/start", json.dumps([f"{os.environ['MASTER_ADDR']}:{meeting.port}", start.dtype]))
    meet, dtype = json.loads(store.get("thinwire/start"))
    island = Island(number, place.world_size // size, meet)
    run_dir = RunDir(config.run_dir).island(number)
    run = run.but(run_dir=str(run_dir.path))
    if number and rank == 0:
        run_dir.claim(0, to_toml(run.config), overwrite=config.overwrite)
    join_group(dist.PrefixStore(f"island{number}", store), rank, size, timeout)
    return run, Place(rank, rank, size, island), replace(start, dtype=dtype), (meeting, store)


def join_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Make the default process group of the ranks that share a store."""
    own = dist.PrefixStore("thinwire/group", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=timeout)


def exit_after(run: Run, place: Place, start: Start | None, *, trace: bool) -> NoReturn:
    """Work, then end the process: 0, or the error's exit code with its message (and `trace`) on stderr."""
    code = 0
    try:
        signum = record(work)(run, place, start) or 0
        # Our launcher has received the signal too, and sets the exit code itself.
        code = 128 + signum if signum and not trace else 0
    except ThinwireError as error:
        if trace:
            traceback.print_exc()
        print(f"thinwire: rank {place.rank}: {error}", file=sys.stderr)
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo may still wait for a peer that is gone; nothing is left to clean up but them.
    os._exit(code)


class Stamped(io.TextIOBase):
    """A log whose lines begin with the time."""

    def __init__(self, log: TextIO) -> None:
        self._log, self._begins_line = log, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._log.write(time.strftime("%Y-%m-%d %H:%M:%S ") + line if self._begins_line else line)
            self._begins_line = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._log.flush()

    def fileno(self) -> int:
        return self._log.fileno()


def main() -> NoReturn:
    """`python -m thinwire.launch.worker CONFIG.toml START`, as the launcher runs it."""
    sys.stderr = Stamped(sys.stderr)
    config_path, start = sys.argv[1:]
    place = Place.from_environment()
    if place is None:
        raise SystemExit("a worker is started by `thinwire train`, not by hand")
    problems = Problems()
    config = read_toml(Path(config_path), problems)
    problems.raise_any()
    found = Start.from_json(start)
    config = replace(
        config, stop_at=found.stop_at, inject=found.inject, allow_resume_drift=found.allow_resume_drift
    )  # fmt: skip
    exit_after(Run.of(config), place, found, trace=True)


if __name__ == "__main__":
    main()
