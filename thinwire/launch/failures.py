"""Finds the first cause of a failed run in what its workers left, and states it in one short message."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from thinwire.checkpoint import latest, step_of
from thinwire.collectives import faults
from thinwire.errors import ConfigError, ThinwireError, UnsavedError, counted
from thinwire.methods.memory.units import read_bytes
from thinwire.report import write_report
from thinwire.report.metrics import read_metrics
from thinwire.run.run_dir import RunDir
from thinwire.training.kept_steps import last_kept

# Half of the time that torchrun's agent gives workers between asking them to end and killing them.
AGENT_PATIENCE_S = 15
# Errors whose message says it all.
SAID_PLAINLY = ("ConfigError", "CheckpointError", "PeerLostError", "ThinwireError", "UnsavedError")
# The exit code of a process whose libraries can't be loaded, and what the loader says where there is no memory for it.
LOADER_FAILED, NO_ROOM = 127, "cannot allocate memory"
# What torch, the interpreter and the system say where a process has no more memory.
OUT_OF_MEMORY = (
    "can't allocate memory", "can't start new thread", "MemoryError", "Cannot allocate memory", "std::bad_alloc",
)  # fmt: skip


def failure(
    failures: Mapping[int, ProcessFailure], run_dir: RunDir, timeout_s: float, injected: Sequence[str] = (), *,
    is_island: bool = False, advice: str = "", memory: str | None = None, durable: bool = False,
) -> ThinwireError:  # fmt: skip
    """A short message about why the run failed: the first cause, and what is left of the run.

    Writes the report of the steps so far, which no worker has done; not while other islands may go on.

    Args:
        timeout_s: how long ranks wait for a silent one.
        is_island: only an island failed, and others may continue.
        advice: how the run would have survived the loss of a process.
        memory: each worker's budget, as stated.
        durable: the run keeps every step on its disks.
    """
    rank, cause = first_cause(failures)
    records = read_metrics(run_dir.metrics)
    what = starved(rank, cause, run_dir, memory) or explain(rank, cause, injected, is_island=is_island)
    if "PeerLostError" in str(cause.message):
        what = hung(failures, cause.timestamp - timeout_s) + what
    if cause.exitcode == ConfigError.exit_code:
        return ConfigError(what)
    steps = f"{counted(len(records), 'step')} in {run_dir.metrics}" if records else "no step was finished"
    left = [steps, f"details are in {run_dir.logs}"]
    if not is_island:
        left[1:1] = [way_on(run_dir, durable=durable)]
        left[1:1] = [advice] if advice and is_killed(cause) else []
        left[1:1] = report_of(run_dir) if records else []
    kind = UnsavedError if is_unsaved(cause) else ThinwireError
    return kind(f"{what}\n{'; '.join(left)}")


def way_on(run_dir: RunDir, *, durable: bool) -> str:
    """Words on how to go on with a run that has failed. durable: it keeps every step."""
    saved = step_of(latest(run_dir.checkpoints))
    if durable and (kept := last_kept(run_dir)) > saved:
        return f"--resume goes on after step {kept}, which the durable run keeps on its disks"
    return f"--resume goes on after step {saved}" if saved else "no checkpoint is saved, so start anew"


def report_of(run_dir: RunDir) -> list[str]:
    """Write the report of a run that has ended early. Return words on it: where it is, or why there is none."""
    try:
        return [f"report: {write_report(run_dir.path)}"]
    except ConfigError as error:
        return [str(error)]


def first_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and its failure; the other failures follow from it.

    A killed process comes first, then any error but a lost peer, then a lost peer. Last come processes that the agent
    itself has ended, by SIGTERM, or killed because they were frozen: what others report was before that.
    """
    first_report = min((f.timestamp for f in failures.values() if not is_killed(f)), default=math.inf)

    def order(failure: ProcessFailure) -> tuple[int, int]:
        if failure.exitcode == -signal.SIGTERM:
            return 3, failure.timestamp
        if is_killed(failure):
            return (0 if failure.timestamp < first_report + AGENT_PATIENCE_S else 3), failure.timestamp
        return 1 + ("PeerLostError" in str(failure.message)), failure.timestamp

    return min(failures.items(), key=lambda item: order(item[1]))


def hung(failures: Mapping[int, ProcessFailure], since: float) -> str:
    """Names the workers that hung and had to be killed, and since when they were silent; empty if there are none."""
    killed = [f"rank {rank} (pid {one.pid})" for rank, one in failures.items() if is_killed(one)]
    clock = time.strftime("%H:%M:%S", time.localtime(since))
    return f"{', '.join(killed)} has hung since about {clock}, and was ended; " if killed else ""


def explain(rank: int, cause: ProcessFailure, injected: Sequence[str] = (), *, is_island: bool = False) -> str:
    """What happened to a rank, and what the ranks that trained with it have done."""
    if is_killed(cause):
        asked = ", or as --inject asks" if any(faults.parse(text).kind == "kill" for text in injected) else ""
        by_whom = f" (by hand, or by the system because memory ran out{asked})"
        hint = by_whom if cause.exitcode == -signal.SIGKILL else ""
        others = "the rest of its island stopped" if is_island else "the others stopped"
        return f"rank {rank} (pid {cause.pid}) was killed by {cause.signal_name()}{hint}; {others}"
    message = message_of(cause)
    kind, _, text = message.partition(": ")
    return f"rank {rank}: {text if kind in SAID_PLAINLY else message}"


def starved(rank: int, cause: ProcessFailure, run_dir: RunDir, memory: str | None) -> str:
    """Says that a worker's budget is too small to load its libraries, or to train, if that ended it; else empty."""
    if memory is None:
        return ""
    near = f"nearest: --memory {math.ceil(1.25 * read_bytes(memory) / 1e6)}mb, or leave --memory out"
    log = run_dir.logs / f"rank{rank}.log"
    if cause.exitcode == LOADER_FAILED and log.exists() and NO_ROOM in log.read_text():
        return f"rank {rank} could not load its libraries in --memory {memory}; {near}"
    told = message_of(cause).partition("\n")[0]
    if cause.exitcode == ConfigError.exit_code or not any(words in told for words in OUT_OF_MEMORY):
        return ""
    return f"rank {rank} needed more than --memory {memory} ({told}); {near}"


def message_of(cause: ProcessFailure) -> str:
    """What a worker has said, with the kind of error in front."""
    return str(cause.message["message"] if isinstance(cause.message, dict) else cause.message)


def is_unsaved(cause: ProcessFailure) -> bool:
    """Whether the run had reached its end, but could not write its results."""
    return message_of(cause).startswith("UnsavedError: ")


def is_killed(cause: ProcessFailure) -> bool:
    """Whether a signal ended it that the agent did not send itself while closing."""
    return cause.exitcode < 0 and cause.exitcode != -signal.SIGTERM


def has_failed_by_itself(failure: ProcessFailure) -> bool:
    """Whether it failed by itself: neither by a signal nor because another rank was lost."""
    return failure.exitcode > 0 and "PeerLostError" not in str(failure.message)
