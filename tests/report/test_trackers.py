from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire.report import trackers
from thinwire.report.trackers import Trackers, open_trackers


class Recorder:
    """A tracker that keeps what it is told and fails at one step."""

    def __init__(self, fail_at: int = -1, fail_close: bool = False) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self.fail_at = fail_at
        self.fail_close = fail_close

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fail_at:
            raise ConnectionError("the server\nwent away")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1
        if self.fail_close:
            raise OSError("disk full")


def test_no_names_do_nothing(tmp_path: Path) -> None:
    opened = open_trackers([], tmp_path, {})
    opened.log(1, {"loss": 2.0})
    opened.close()
    assert list(tmp_path.iterdir()) == []


def test_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord' is not known; did you mean 'tensorboard'\?"):
        open_trackers(["tensorbord"], tmp_path, {})


def test_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[track\]'"):
        open_trackers(["wandb"], tmp_path, {})


def test_one_that_fails_is_announced_once_and_dropped() -> None:
    said: list[str] = []
    good, bad = Recorder(), Recorder(fail_at=2)
    both = Trackers({"bad": bad, "good": good}, said.append)
    for step in (1, 2, 3):
        both.log(step, {"loss": 1.0 / step})
    both.close()
    both.close()
    assert [step for step, _ in good.rows] == [1, 2, 3]
    assert [step for step, _ in bad.rows] == [1]
    assert (good.closed, bad.closed) == (1, 1)
    assert len(said) == 1
    assert "'bad' failed at step 2" in said[0] and "the server went away" in said[0]


def test_a_close_that_fails_does_not_stop_the_others() -> None:
    said: list[str] = []
    bad, good = Recorder(fail_close=True), Recorder()
    Trackers({"bad": bad, "good": good}, said.append).close()
    assert good.closed == 1
    assert len(said) == 1 and "disk full" in said[0]


def test_one_that_does_not_start_closes_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Recorder()

    def refuse(run_dir: Path, config: Mapping[str, Any]) -> Recorder:
        raise RuntimeError("no api key")

    monkeypatch.setattr(trackers, "TRACKERS", {"json": lambda run_dir, config: first, "csv": refuse})
    with pytest.raises(ConfigError, match=r"'csv' did not start.*no api key"):
        open_trackers(["json", "csv"], tmp_path, {})
    assert first.closed == 1


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    opened = open_trackers(["tensorboard", "tensorboard"], tmp_path, {"model": "tiny", "lr": 0.001})
    assert opened.names == ["tensorboard"]
    for step, loss in enumerate((5.5, math.nan, 4.0), start=1):
        opened.log(step, {"loss": loss, "sent_bytes": 1000.0})
    opened.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    read = [(event.step, event.value) for event in events.Scalars("loss")]
    assert read[0] == (1, 5.5) and math.isnan(read[1][1]) and read[2] == (3, 4.0)
    assert events.Scalars("sent_bytes")[2].value == 1000.0
