"""Real processes with real gloo sockets for tests: forked from one server that has loaded what they need."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
CONTEXT = multiprocessing.get_context("forkserver")
# Loaded once and inherited, and not by every rank anew: half a second of each, most of it for numba's kernels.
CONTEXT.set_forkserver_preload(["tests.preloaded"])


# Only a test that hangs waits for so long: a busy machine may be ten times slower than a quiet one.
HANG_S = 900.0
# What the others have left to end, or to say why they can't, when one has failed.
GRACE_S = 30.0


class WorkerFailed(AssertionError):
    """A worker raised; carries its traceback."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _main(
    rank: int,
    world_size: int,
    local_size: int,
    store: str,
    stay_s: float,
    function: Callable,
    args: tuple,
    pipe: Connection,
    has_group: bool,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(local_size))
    try:
        if has_group:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=HANG_S),
            )
        # Plain pickle: the Pipe's own would hand tensors over in memory that ends with this process.
        pipe.send_bytes(pickle.dumps((True, function(rank, world_size, *args))))
        # Who leaves breaks connections that a slower rank may still be making: all stay until all are done.
        pipe.poll(stay_s)
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
    # gloo's threads may still wait for a peer that a test killed.
    os._exit(0)


def run_workers(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    local_size: int | None = None,
    may_die: tuple[int, ...] = (),
    has_group: bool = True,
    error_in: Callable[[Any], str] = lambda result: "",
) -> list[Any]:
    """Call function(rank, world_size, *args) in `world_size` processes; their results in rank order.

    has_group: whether they are ranks of a default process group when they begin. error_in: the error that a rank has
    caught and returned; from then on the others have GRACE_S, as they may wait for a message of this rank.
    Raises WorkerFailed with the first traceback; a rank in `may_die` may end without a result (None).
    """
    # After a death the survivors' own ends are what wakes those who wait for them, so there nobody stays.
    stay_s = 0.0 if may_die else HANG_S
    results: list[Any] = [None] * world_size
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes: dict[Connection, int] = {}
        ends: list[Connection] = []
        workers = []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe()
            worker = CONTEXT.Process(
                target=_main,
                args=(rank, world_size, local_size or world_size, store, stay_s, function, args, theirs, has_group),
                daemon=True,
            )
            worker.start()
            theirs.close()
            workers.append(worker)
            pipes[ours] = rank
            ends.append(ours)
        failures: list[str] = []
        caught: list[str] = []
        deadline = time.monotonic() + HANG_S
        try:
            while set(pipes.values()) - set(may_die) and (
                ready := wait(list(pipes), max(0.0, deadline - time.monotonic()))
            ):
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    rank = pipes.pop(pipe)
                    try:
                        succeeded, value = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        if rank not in may_die:
                            failures.append(f"rank {rank} died without a word")
                        continue
                    if succeeded:
                        results[rank] = value
                        if error := error_in(value):
                            caught.append(f"rank {rank}:\n{error}")
                    else:
                        failures.append(f"rank {rank}:\n{value}")
                    if failures or caught:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            stuck = [rank for rank in pipes.values() if rank not in may_die]
            if stuck:
                failures += [*caught, f"ranks {stuck} still running"]
        finally:
            for end in ends:
                end.close()
            for worker in workers:
                worker.join(1.0 if not pipes and not failures else 0.0)
                if worker.is_alive():
                    worker.kill()
                    worker.join()
    if failures:
        raise WorkerFailed("\n".join(failures))
    return results


def run_program(file: Path, num_ranks: int) -> tuple[str, str]:
    """Run a program for torchrun, in the folder that it lies in, as ranks of one node; their stdout and stderr.

    It finds torchrun's variables, no process group, and what `tests.preloaded` has loaded. Raises WorkerFailed.
    """
    with meeting() as place:
        told = run_workers(_program, num_ranks, file, place, has_group=False)
    return "".join(out for out, _ in told), "".join(err for _, err in told)


@contextlib.contextmanager
def meeting() -> Iterator[dict[str, str]]:
    """Where ranks meet, as torchrun tells them: its store listens before they start, so nobody else takes the port."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    del store


def _program(rank: int, world_size: int, file: Path, place: dict[str, str]) -> tuple[str, str]:
    os.environ.update(place, LOCAL_RANK=str(rank))
    os.chdir(file.parent)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        runpy.run_path(str(file), run_name="__main__")
    return out.getvalue(), err.getvalue()


def run_command(arguments: Sequence[str], num_ranks: int, log: Path) -> None:
    """Run `thinwire ARGUMENTS` as torchrun runs it on one node; all that the ranks print goes to `log`.

    They find what `tests.preloaded` has loaded. Raises WorkerFailed where one does not end with exit code 0.
    """
    with meeting() as place:
        args = num_ranks, place, arguments, log
        ranks = [CONTEXT.Process(target=_command, args=(rank, *args), daemon=True) for rank in range(num_ranks)]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + HANG_S
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
                rank.join()
    if any(code != 0 for code in codes):
        raise WorkerFailed(f"thinwire {' '.join(arguments)}: exit codes {codes}\n{log.read_text()[-4000:]}")


def _command(rank: int, num_ranks: int, place: dict[str, str], arguments: Sequence[str], log: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    os.environ.update(place)
    sys.argv = ["thinwire", *arguments]
    with log.open("a", buffering=1) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            runpy.run_module("thinwire", run_name="__main__")


class Command:
    """`thinwire ARGUMENTS` in a process of its own, with what a Popen has of it; a new interpreter takes seconds more.

    It finds what `tests.preloaded` has loaded.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.args = ["thinwire", *arguments]
        self._outputs = [Path(tempfile.mkstemp(suffix=f".{name}")[1]) for name in ("out", "err")]
        self._process = CONTEXT.Process(target=_alone, args=(self.args, folder, dict(env), self._outputs), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative after a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has printed when it has ended. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        out, err = (path.read_text() for path in self._outputs)
        return out, err

    def close(self) -> None:
        """Forget what it has printed."""
        for path in self._outputs:
            path.unlink()


def _alone(words: list[str], folder: Path, env: dict[str, str], outputs: list[Path]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = words
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    runpy.run_module("thinwire", run_name="__main__")


@dataclass(frozen=True)
class RowFailed:
    """What a rank has to say of a row in which it raised."""

    traceback: str


class Rows:
    """The ranks' results for several rows that shared one start of the processes."""

    def __init__(self, told: list[dict[str, Any]]) -> None:
        self.told = told

    def of(self, name: str) -> list[Any]:
        """The results for a row in rank order; raises WorkerFailed where it failed, or one before it."""
        failed = [f"rank {rank}, {name}:\n{found.traceback}" for rank, name, found in self._failures()]
        if failed and any(name not in told or isinstance(told[name], RowFailed) for told in self.told):
            raise WorkerFailed("\n".join(failed))
        return [told[name] for told in self.told]

    def _failures(self) -> list[tuple[int, str, RowFailed]]:
        rows = [(rank, name, found) for rank, told in enumerate(self.told) for name, found in told.items()]
        return [row for row in rows if isinstance(row[2], RowFailed)]


def run_rows(
    function: Callable[..., Any],
    names: Sequence[str],
    world_size: int,
    *args: Any,
    local_size: int | None = None,
) -> Rows:
    """Call function(rank, world_size, name, *args) for one name after the other in the same processes.

    The first row that fails is the last: its processes no longer agree what comes next. Raises WorkerFailed if a rank
    fails and another waits for it.
    """
    told = run_workers(_rows, world_size, function, names, args, local_size=local_size, error_in=_row_error)
    return Rows(told)


def _row_error(told: Mapping[str, Any]) -> str:
    """The error of the row that ended a rank; empty if there was none."""
    return "".join(f"{name}: {found.traceback}" for name, found in told.items() if isinstance(found, RowFailed))


def _rows(rank: int, world_size: int, function: Callable, names: Sequence[str], args: tuple) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in names:
        try:
            told[name] = function(rank, world_size, name, *args)
        except BaseException:
            told[name] = RowFailed(traceback.format_exc())
            break
    return told
