"""The record of a race, kept in OUT/compare.json so that an interrupted race can be resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.compare.contestants import COMPUTE
from thinwire.errors import ConfigError

FILE = "compare.json"
PAGE = "compare.html"


@dataclass
class Leg:
    """One start of a contestant, up to the end of a round or an interruption.

    Steps count from 1, and 0 stands for none.

    Args:
        first_timed, last_timed: the steps that ran in the slow network after the warm-up.
        kernel_*_bytes: bytes on each node's link during `kernel_steps` of these steps.
        is_complete: whether the leg reached the end of its round.
    """

    turn: int
    is_complete: bool = False
    first_step: int = 0
    last_step: int = 0
    first_timed: int = 0
    last_timed: int = 0
    kernel_steps: int = 0
    kernel_sent_bytes: list[int] = field(default_factory=list)
    kernel_received_bytes: list[int] = field(default_factory=list)


@dataclass
class SeedEntry:
    """One contestant's run with one seed. peak_rss_bytes: the largest over ranks and legs; None: not known."""

    contestant: str
    seed: int
    legs: list[Leg] = field(default_factory=list)
    peak_rss_bytes: int | None = None
    failed: str = ""

    @property
    def last_step(self) -> int:
        return max((leg.last_step for leg in self.legs), default=0)

    def has_done(self, turn: int) -> bool:
        return any(leg.is_complete and leg.turn == turn for leg in self.legs)

    @property
    def num_timed(self) -> int:
        return sum(leg.last_timed - leg.first_timed + 1 for leg in self.legs if leg.last_timed)


@dataclass
class Alone:
    """Seconds of a step of computation alone, in one round, and of the forward passes in it."""

    seed: int
    turn: int
    step_s: float
    forward_s: float = 0.0


@dataclass
class RaceRecord:
    """All legs of a race.

    Args:
        command: the command line as typed.
        alone_failed: why computation alone could not be measured.
        stopped: the signal that ended the race early.
    """

    settings: dict[str, Any]
    command: str = ""
    entries: list[SeedEntry] = field(default_factory=list)
    alone: list[Alone] = field(default_factory=list)
    alone_failed: str = ""
    stopped: str = ""

    def entry(self, contestant: str, seed: int) -> SeedEntry:
        """The contestant's run with this seed; added if it is missing."""
        for entry in self.entries:
            if (entry.contestant, entry.seed) == (contestant, seed):
                return entry
        self.entries.append(SeedEntry(contestant, seed))
        return self.entries[-1]

    def failure(self, contestant: str) -> str:
        """Why the contestant is out of the race; empty if it is not."""
        return next((entry.failed for entry in self.entries if entry.contestant == contestant and entry.failed), "")

    def save(self, out: Path, result: Mapping[str, Any]) -> None:
        """Write compare.json: the result for readers, and the legs for a resume."""
        draft = out / f".{FILE}.tmp"
        draft.write_text(json.dumps({**result, "record": asdict(self)}, indent=1) + "\n")
        draft.replace(out / FILE)


def load_record(out: Path, settings: dict[str, Any]) -> RaceRecord:
    """Load the record of the race to resume. Failed contestants will run again.

    Raises ConfigError for another race's record, or one that can't be read.
    """
    path = out / FILE
    try:
        values = json.loads(path.read_text())["record"]
        entries = [
            SeedEntry(**{**entry, "legs": [Leg(**leg) for leg in entry["legs"]], "failed": ""})
            for entry in values["entries"]
        ]
        alone = [Alone(**measured) for measured in values["alone"]]
        record = RaceRecord(values["settings"], values["command"], entries, alone)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--resume: {path} can't be read ({error!r}); start again with --overwrite") from None
    changed = [
        f"{name} was {old!r} and can't become {new!r}"
        for name, old, new in differences(record.settings, json.loads(json.dumps(settings)))
    ]
    if changed:
        raise ConfigError(f"--resume: {'; '.join(changed)}; give the same command as before, or --overwrite")
    return record


def recorded_dtype(out: Path) -> Any:
    """The compute dtype that was measured when the race began; auto if it can't be read."""
    try:
        return json.loads((out / FILE).read_text())["record"]["settings"]["train"]["dtype"]
    except (OSError, ValueError, KeyError, TypeError):
        return "auto"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, old value, new value) of everything that differs."""
    found: list[tuple[str, Any, Any]] = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append((prefix + name, before, after))
    return found


def delete_race(out: Path) -> None:
    """Delete the files of a race below `out`, and nothing else in it."""
    try:
        entries = json.loads((out / FILE).read_text())["record"]["entries"]
        names = {entry["contestant"] for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        names = set()
    for name in {*names, COMPUTE}:
        shutil.rmtree(out / name, ignore_errors=True)
    for name in (FILE, PAGE):
        (out / name).unlink(missing_ok=True)
