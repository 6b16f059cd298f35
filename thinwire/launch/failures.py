"""Why a run has failed: the first cause among what its workers left behind, in one short message."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from thinwire.checkpoint import latest, step_of
from thinwire.collectives import faults
from thinwire.errors import ConfigError, ThinwireError, UnsavedError
from thinwire.training.metrics import read_metrics
from thinwire.training.run_dir import RunDir

# Half of the time that torchrun's agent gives workers between asking them to end and killing them.
AGENT_PATIENCE_S = 15
# Errors whose message says it all.
SAID_PLAINLY = ("ConfigError", "CheckpointError", "PeerLostError", "ThinwireError", "UnsavedError")


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
