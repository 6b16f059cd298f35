"""One worker process: joins the others, trains, and leaves without hanging."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from thinwire.errors import ThinwireError
from thinwire.training.config import TrainConfig, with_derived
from thinwire.training.hardware import threads_per_worker
from thinwire.training.prepare import Start
from thinwire.training.problems import Problems
from thinwire.training.settings import read_config, with_optimizer
from thinwire.training.signals import StopFlag
from thinwire.training.trainer import Place, Trainer


def place_from_environment() -> Place | None:
    """This process among the others, as torchrun's agent states it; None outside of it."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return None
    return Place(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))


def work(config: TrainConfig, place: Place, start: Start | None) -> int:
    """Train as one rank; returns the signal that asked this process to stop, or 0.

    start: what was found out before the workers, known at least on rank 0.
    """
    torch.set_num_threads(threads_per_worker(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))[0])
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout))
    # Not before: a worker that still waits for the others, who may never come, must die of SIGTERM.
    stop = StopFlag()
    start = start or Start()
    trainer = Trainer(with_optimizer(with_derived(config)), place, stop, start.dtype, start.effects)
    try:
        trainer.run()
    finally:
        if trainer.reporter is not None:
            trainer.reporter.close()
    dist.destroy_process_group()
    return stop.signum


def exit_after(config: TrainConfig, place: Place, start: Start | None, *, trace: bool) -> NoReturn:
    """Work, then end the process: 0, or the error's exit code with its message (and `trace`) on stderr."""
    code = 0
    try:
        signum = record(work)(config, place, start) or 0
        # Our own launcher has the signal too, and gives the exit code itself.
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


def main() -> NoReturn:
    """`python -m thinwire.training.worker CONFIG.toml START`, as the launcher runs it."""
    config_path, start = sys.argv[1:]
    place = place_from_environment()
    if place is None:
        raise SystemExit("a worker is started by `thinwire train`, not by hand")
    problems = Problems()
    config = read_config([config_path], problems)
    problems.raise_any()
    found = Start.from_json(start)
    config = replace(config, stop_at=found.stop_at, allow_resume_drift=found.allow_resume_drift)
    exit_after(config, place, found, trace=True)


if __name__ == "__main__":
    main()
