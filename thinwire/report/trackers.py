"""Experiment trackers through one adapter; `metrics.jsonl` is written in any case."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import ConfigError, nearest

PROJECT = "thinwire"


class Tracker(Protocol):
    """What a tracker must be able to do."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the named values of one step."""

    def close(self) -> None:
        """Write what is buffered and let go."""


class TensorBoard:
    """Event files under RUN_DIR/tensorboard."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        rows = (f"    {key} = {value!r}" for key, value in config.items())
        self._writer.add_text("config", "\n".join(rows))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Hosted:
    """A run of Weights & Biases (files under RUN_DIR/wandb) or of Trackio (its own local store), named as RUN_DIR."""

    def __init__(self, package: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        own = {"dir": str(run_dir)} if package == "wandb" else {"embed": False}
        module: Any = importlib.import_module(package)
        self._run = module.init(project=PROJECT, name=run_dir.name, config=dict(config), **own)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": partial(Hosted, "trackio"),
    "wandb": partial(Hosted, "wandb"),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that isn't known or a package that isn't installed; opens nothing."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"tracker {name!r} is not known{nearest(name, TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracker {name!r} needs a package that is missing: pip install -e '.[track]' in thinwire's folder"
            )


class Trackers:
    """Several trackers as one; one that fails is announced once and dropped, and training goes on."""

    def __init__(self, trackers: Mapping[str, Tracker], announce: Callable[[str], None]) -> None:
        self._trackers = dict(trackers)
        self._announce = announce

    @property
    def names(self) -> list[str]:
        """The trackers that still take part."""
        return list(self._trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand one step's values to every tracker."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, values)
            except Exception as error:
                self._drop(name, f"failed at step {step}", error)
                with contextlib.suppress(Exception):
                    tracker.close()

    def close(self) -> None:
        """Close every tracker; may be called twice."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:
                self._drop(name, "failed to close", error)
        self._trackers.clear()

    def _drop(self, name: str, what: str, error: Exception) -> None:
        del self._trackers[name]
        reason = " ".join(str(error).split())[:200]
        self._announce(
            f"tracker {name!r} {what} and is dropped ({type(error).__name__}: {reason}); "
            f"training goes on and metrics.jsonl has every step"
        )


def open_trackers(
    names: Sequence[str],
    run_dir: Path,
    config: Mapping[str, Any],
    announce: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Trackers:
    """Open the named trackers for a run; call it on one rank only.

    Raises ConfigError, with nothing left open, for an unknown name, a missing package, a refusing tracker.
    """
    check_trackers(names)
    opened = Trackers({}, announce)
    for name in dict.fromkeys(names):
        try:
            opened._trackers[name] = TRACKERS[name](run_dir, config)
        except Exception as error:
            opened.close()
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"tracker {name!r} did not start ({type(error).__name__}: {reason}); train without it"
            ) from error
    return opened
