"""Fault injection at a chosen process, step and message, to test how a run reacts to faults.

`arm` sets the faults, `at_step` is called at every step, and the exchange calls `on_message` for every message that it
sends while a fault is armed. Each fault fires once and is announced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from thinwire.errors import ConfigError, nearest

KINDS = {
    "kill": "ends the process at once",
    "freeze": "stops all of its threads for some seconds",
    "delay": "keeps it, or one message, waiting for some seconds",
    "corrupt": "flips one bit of one message",
    "drop": "does not send one message",
}
LASTING = ("freeze", "delay")
OF_A_MESSAGE = ("corrupt", "drop")


@dataclass(frozen=True)
class Fault:
    """One fault of one process.

    Args:
        kind: one of KINDS.
        rank, island, stage: numbers of the process; None: any.
        step: the optimizer step, from 1, at whose beginning the fault fires.
        operation: a collective's name as in the meter and in error messages. With it, the fault fires at the first
            message of that operation that the process sends from `step` on.
        seconds: duration of a freeze or a delay.

    Raises ConfigError for a fault that could not fire.
    """

    kind: str
    rank: int | None = None
    island: int | None = None
    step: int | None = None
    operation: str | None = None
    seconds: float | None = None
    stage: int | None = None

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        if self.rank is None and self.island is None and self.stage is None:
            raise ConfigError(f"{self}: say which process it hits, such as rank=1, island=1 or stage=1")
        if self.step is None and self.operation is None:
            raise ConfigError(f"{self}: say when it fires, such as step=10")
        if self.kind in OF_A_MESSAGE and self.operation is None:
            raise ConfigError(f"{self}: say which message it hits, such as operation=outer")
        for name, lowest in (("rank", 0), ("island", 0), ("stage", 0), ("step", 1)):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"{self}: {name} must be at least {lowest}")
        if (self.kind in LASTING) != (self.seconds is not None):
            needs = "needs seconds, such as seconds=10" if self.kind in LASTING else "has no seconds"
            raise ConfigError(f"{self}: a {self.kind} {needs}")
        if self.seconds is not None and not 0 < self.seconds < 1e6:
            raise ConfigError(f"{self}: seconds must be above 0 and below a million")

    def __str__(self) -> str:
        stated = ((item.name, getattr(self, item.name)) for item in fields(self)[1:])
        return " ".join([self.kind, *(f"{name}={_shown(value)}" for name, value in stated if value is not None)])

    def befalls(self, rank: int, island: int | None, stage: int | None = None) -> bool:
        """Whether the fault applies to the process with these numbers."""
        return self.rank in (None, rank) and self.island in (None, island) and self.stage in (None, stage)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"no fault is called {kind!r}{nearest(kind, KINDS)}")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse(text: str) -> Fault:
    """The fault described by a text such as "freeze rank=1 step=10 seconds=10". Raises ConfigError."""
    kind, *pairs = text.split() or [""]
    _check_kind(kind)
    convert: dict[str, Callable[[str], Any]] = {
        "rank": int, "island": int, "stage": int, "step": int, "operation": str, "seconds": float,
    }  # fmt: skip
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"fault {text!r}: {pair!r} is not NAME=VALUE, such as step=10")
        if key not in convert:
            raise ConfigError(f"fault {text!r}: unknown name {key!r}{nearest(key, convert)}")
        try:
            values[key] = convert[key](value)
        except ValueError:
            raise ConfigError(f"fault {text!r}: {key} must be a number, not {value!r}") from None
    return Fault(kind, **values)


def say(message: str) -> None:
    """Announce a fault by a line on stderr; the default announcement."""
    print(message, file=sys.stderr, flush=True)


_lock = threading.Lock()
_armed: list[Fault] = []
_step = 0
_announce: Callable[[str], None] = say


def arm(
    faults: Iterable[Fault],
    *,
    rank: int,
    island: int | None = None,
    stage: int | None = None,
    announce: Callable[[str], None] = say,
) -> list[Fault]:
    """Arm the faults that apply to the process with these numbers. Return them."""
    global _announce
    _announce = announce
    _armed[:] = [fault for fault in faults if fault.befalls(rank, island, stage)]
    return list(_armed)


def disarm() -> list[Fault]:
    """Disarm all faults. Return those that never fired."""
    global _step
    left, _armed[:], _step = list(_armed), [], 0
    return left


def are_armed() -> bool:
    """Whether any fault can still fire. Without faults, this check is all that a message costs."""
    return bool(_armed)


def at_step(step: int) -> None:
    """Note that a step begins, counted from 1, and fire the faults that are due."""
    global _step
    _step = step
    while fault := _due(lambda fault: fault.operation is None and fault.step == step):
        _befall(fault)


def on_message(operation: str, message: Tensor) -> Tensor | None:
    """The message to send in place of `message`, or None to send nothing. At most one fault applies to a message.

    The caller must keep the returned tensor alive.
    """
    fault = _due(lambda fault: fault.operation == operation and _step >= (fault.step or 0))
    if fault is None:
        return message
    if fault.kind == "drop":
        return None
    if fault.kind == "corrupt":
        message = message.clone()
        message[message.numel() // 2 :][:1] ^= 1
    else:
        _befall(fault)
    return message


def _due(is_due: Callable[[Fault], bool]) -> Fault | None:
    """Remove the next due fault from the armed ones, and announce it."""
    if not _armed:
        return None
    with _lock:
        fault = next(filter(is_due, _armed), None)
        if fault is not None:
            _armed.remove(fault)
    if fault is not None:
        _announce(f"thinwire: fault injected in step {_step}: {fault}")
    return fault


def _befall(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "freeze":
        # All threads stop, so another process must wake them.
        waker = subprocess.Popen(["/bin/sh", "-c", f"sleep {fault.seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
    elif fault.kind == "delay":
        time.sleep(fault.seconds or 0.0)
