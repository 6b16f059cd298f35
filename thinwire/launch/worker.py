"""One worker process: joins the others, trains, and ends without hanging."""

from __future__ import annotations

import io
import json
import os
import resource
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

from thinwire import _compat
from thinwire.collectives import host_meeting
from thinwire.collectives.groups import forget_groups
from thinwire.collectives.incarnations import Incarnations, connect
from thinwire.collectives.store_gather import gather
from thinwire.device import Device, choose, take
from thinwire.errors import PeerLostError, Problems, ThinwireError
from thinwire.hosts.offload.room import hold_to
from thinwire.launch.machine import threads_per_worker
from thinwire.launch.start import Start
from thinwire.limits import limit_bytes
from thinwire.run.config import with_derived
from thinwire.run.effects import late_rows
from thinwire.run.place import IslandPlace, ProcessPlace
from thinwire.run.run import Run, island_size
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import parse_toml, read_toml, to_toml
from thinwire.run.signals import StopFlag
from thinwire.training.clock import fix_steps
from thinwire.training.recovery import Survivor
from thinwire.training.trainer import Trainer

# Losses without a step between them after which a stage gives up.
MOST_LOSSES = 5


def work(run: Run, place: ProcessPlace, start: Start | None) -> int:
    """Train as one rank. Return the signal that asked this process to stop, or 0.

    start: what the launcher found out; known at least on rank 0.
    """
    torch.set_num_threads(threads_per_worker(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))[0])
    run = replace(run, config=with_derived(run.config)).with_island_size()
    if run.memory_bytes is not None:
        # A worker that plans is held to its budget when the plan says what fits.
        hold_to((limit_bytes() or resource.RLIM_INFINITY) if run.config.plans else run.memory_bytes)
    # Only rank 0 has what was found out before torchrun started the others.
    start, number = start or Start(), place.local_rank
    if run.recovers:
        return work_on(run, place.ordered(run.config.order), start)
    timeout = timedelta(seconds=run.config.timeout)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    if run.config.plans:
        run, start = plan_late(run, place, store, start, number)
    place = place.ordered(run.config.order)
    run, place, start, device, held = join_world(run, place, start, number, store)
    # Only now: SIGTERM must end a worker that still waits for others, who may never come.
    stop = StopFlag(is_replaced=start.island is not None)
    dtype = dtype_of(run, start, device)
    rows = start.effects
    if run.config.chooses_across:
        # Few runs need it.
        from thinwire.planner.chosen import choose_across

        run, more = choose_across(run, device, dtype)
        rows = [*rows, *more]
        keep_config(run, place)
    if run.config.chooses_experts:
        # Few runs need it.
        from thinwire.planner.chosen import choose_experts

        run, more = choose_experts(run, device, dtype)
        rows = [*rows, *more]
        keep_config(run, place)
    if run.chooses_attention:
        # Few runs need it.
        from thinwire.planner.chosen import choose_attention

        run, more = choose_attention(run, dtype)
        rows = [*rows, *more]
    if run.config.minutes is not None:
        run, more = fix_steps(run, place, device, dtype, start.began or time.time())
        rows = [*rows, *more, *late_rows(run)]
        keep_config(run, place)
    trainer = Trainer(run, place, stop, dtype, rows, device)
    if run.config.teacher is not None and trainer.engine.distillation is not None:
        keep_config(run.but(teacher_weight=trainer.engine.distillation.weight), place)
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


def plan_late(run: Run, place: ProcessPlace, store: dist.Store, start: Start, number: int) -> tuple[Run, Start]:
    """The run as the ranks plan it, held to its budget, and the rows about that. A collective over all ranks.

    number: of this worker on its machine. Raises ConfigError on all ranks if nothing fits.
    """
    # Few runs need it.
    from thinwire.launch.check_memory import check_residency
    from thinwire.launch.prepare import by_batch
    from thinwire.launch.reached import require_links
    from thinwire.planner.chosen import skeleton_of
    from thinwire.planner.chosen_plan import asked_by, plan_run

    own = dist.PrefixStore("thinwire/reached", store)
    require_links(own, place.rank, place.world_size, asked_by(run.config))
    run, more = plan_run(run, place, store, start.dtype, number)
    loss, rows = by_batch(run.config)
    run, more = run.but(loss=loss), [*more, *(rows if more else [])]
    if run.memory_bytes is not None:
        hold_to(run.memory_bytes)
    if run.residency is not None:
        check_residency(run.config, run, skeleton_of(run.config))
    keep_config(run, place)
    return run, replace(start, effects=[*start.effects, *more])


def work_on(run: Run, place: ProcessPlace, start: Start) -> int:
    """Train as a stage of a pipeline that survives the loss of other stages, or in place of a lost stage."""
    timeout_s = run.config.timeout
    meetings = Incarnations(connect(start.meet, timeout_s), place.rank, place.world_size, timeout_s)
    survivor: Survivor | None = None
    stop: StopFlag | None = None
    num_losses, last_step = 0, -1
    while True:
        store = meetings.meet()
        trainer: Trainer | None = None
        try:
            _, _, told, device, _ = join_world(run, place, start, place.local_rank, store)
            stop = stop or StopFlag()
            dtype = dtype_of(run, told, device)
            trainer = Trainer(run, place, stop, dtype, told.effects, device, survivor, meetings.number)
            survivor = None
            trainer.run()
        except RuntimeError as error:
            if not is_loss(error):
                raise
            print(f"thinwire: rank {place.rank}: {error}", file=sys.stderr, flush=True)
            if trainer is not None:
                survivor = trainer.survivor()
            elif dist.is_initialized():
                forget_groups()
                dist.destroy_process_group()
            step = survivor.start.step if survivor is not None else -1
            num_losses, last_step = num_losses + 1 if step == last_step else 0, step
            if num_losses == MOST_LOSSES:
                raise
            continue
        assert stop is not None
        if trainer.reporter is not None:
            trainer.reporter.close()
        dist.destroy_process_group()
        return stop.signum


def is_loss(error: RuntimeError) -> bool:
    """Whether an error means that another rank is gone.

    Making groups, and torch's own collectives, report that by errors of gloo.
    """
    return isinstance(error, PeerLostError | dist.DistError) or _compat.is_of_gloo(error)


def dtype_of(run: Run, start: Start, device: Device) -> str | None:
    """The compute type that is fast on this machine, if known."""
    return start.dtype or (None if run.config.dtype == "auto" else run.config.dtype) or device.fast_dtype


def keep_config(run: Run, place: ProcessPlace) -> None:
    """Write the run's config.toml again on every machine, so that choices are kept when the run is resumed."""
    run_dir, node = RunDir(run.config.run_dir), int(os.environ.get("GROUP_RANK", "0"))
    if place.local_rank == 0 and run_dir.config(node).exists():
        run_dir.write_config(node, to_toml(run.config))


def find_device(run: Run, place: ProcessPlace, start: Start, store: dist.Store, number: int) -> tuple[Device, Start]:
    """The device on which this worker trains. All ranks use the same kind: the CPU if any rank has no GPU.

    number: of this worker on its machine. A collective over the ranks that share the store.
    """
    num_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own, _ = choose(run.config.device, num_workers)
    kinds = gather(store, place.rank, place.world_size, own, "its start")
    if own == "cuda" and "cpu" in kinds:
        row = ("device cuda", "cpu", f"rank {kinds.index('cpu')} trains on the CPU, and all ranks must alike")
        return take("cpu", 0), replace(start, effects=[*start.effects, row])
    return take(own, start.first_gpu + number), start


def join_world(
    run: Run, place: ProcessPlace, start: Start, number: int, store: dist.Store
) -> tuple[Run, ProcessPlace, Start, Device, object]:
    """Make the default process group: of all ranks, or of this rank's island.

    number: of this worker on its machine. store: of all ranks. Returns the run, the place, what the launcher found out,
    the device, and an object to hold as long as others may still meet here.
    """
    config = run.config
    timeout = timedelta(seconds=config.timeout)
    own_device, start = find_device(run, place, start, store, number)
    is_one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == place.world_size
    # NCCL between the GPUs of one machine, and where a tensor axis needs it.
    backend = own_device.backend if is_one_machine or config.mesh_shape.tensor > 1 else "gloo"
    size = island_size(config) if run.has_islands else place.world_size
    if start.island is not None or size == place.world_size:
        join_group(store, place.rank, place.world_size, timeout, backend)
        return run, replace(place, island=start.island or IslandPlace()), start, own_device, None
    island_number, rank = divmod(place.rank, size)
    meeting = host_meeting() if place.rank == 0 else None
    if meeting is not None:
        # Only rank 0 knows which dtype is fast, and all islands must compute in the same one.
        store.set("thinwire/start", json.dumps([f"{os.environ['MASTER_ADDR']}:{meeting.port}", start.dtype]))
    meet, dtype = json.loads(store.get("thinwire/start"))
    island = IslandPlace(island_number, place.world_size // size, meet)
    run_dir = RunDir(config.run_dir).island(island_number)
    run = run.but(run_dir=str(run_dir.path))
    if island_number and rank == 0:
        run_dir.claim(0, to_toml(run.config), overwrite=config.overwrite)
    join_group(dist.PrefixStore(f"island{island_number}", store), rank, size, timeout, own_device.backend)
    return run, ProcessPlace(rank, rank, size, island), replace(start, dtype=dtype), own_device, (meeting, store)


def join_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta, backend: str) -> None:
    """Make the default process group of the ranks that share a store."""
    own = dist.PrefixStore("thinwire/group", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)


def exit_after(run: Run, place: ProcessPlace, start: Start | None, *, trace: bool) -> NoReturn:
    """Work, then end the process: with 0, or with the error's exit code and its message (and `trace`) on stderr."""
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
    """A worker, with CONFIG.toml or its text, and START, as arguments; started by the launcher."""
    sys.stderr = Stamped(sys.stderr)
    given, start = sys.argv[1:]
    place = ProcessPlace.from_environment()
    if place is None:
        raise SystemExit("a worker is started by `thinwire train`, not by hand")
    problems = Problems()
    config = parse_toml(given, "CONFIG", problems) if "\n" in given else read_toml(Path(given), problems)
    problems.raise_any()
    found = Start.from_json(start)
    config = replace(
        config, stop_at=found.stop_at, inject=found.inject, allow_resume_drift=found.allow_resume_drift
    )  # fmt: skip
    exit_after(Run.of(config), place, found, trace=True)
