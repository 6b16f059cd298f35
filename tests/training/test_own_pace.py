"""Runs of strategies whose ranks have no step in common, through the command line."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.training.commands import CommandRunner, finish
from thinwire.checkpoint.folder import latest, step_of

OPTIONS: dict[str, dict[str, Any]] = {
    "fedfix": {"fedfix.interval_s": 0.2, "fedfix.local_steps": 2},
    "gossip": {"gossip.step_s": 0.02, "gossip.graph": "complete"},
    "dadao": {"dadao.step_s": 0.02},
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    runner = CommandRunner(tmp_path_factory.mktemp("own-pace"))
    yield runner
    runner.close()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_ends_with_weights_in_common(runner: CommandRunner, name: str) -> None:
    out = runner.ranks(name, strategy=name, checkpoint_every=2, **OPTIONS[name])
    summary = runner.summary(name)
    assert summary["strategy"] == name and summary["stopped"] == "finished"
    assert summary["world_size"] == 2 and summary["steps"] == 6 and summary["tokens"] == 6 * 64
    assert math.isfinite(summary["heldout_loss"]) and summary["heldout_loss"] < 6
    assert [line["step"] for line in runner.metrics(name)] == list(range(1, 7))
    for row in ("taken by every rank at its own pace", "one checkpoint, at the end", "does not repeat a run"):
        assert row in out
    # After the second and the fourth step ranks have nothing in common that could be saved.
    folders = sorted(path.name for path in (runner.folder / name / "checkpoints").glob("step-*"))
    assert folders == ["step-00000006"]
    out = runner.ranks(name, "--steps", "8", resumes=True)
    assert "state of the method: starts anew" in out and "resume proven: step 7" in out
    assert step_of(latest(runner.folder / name / "checkpoints")) == 8


def test_a_signal_stops_all_ranks(runner: CommandRunner) -> None:
    process = runner.train("stopped", strategy="gossip", steps=100_000, warmup_steps=10, **OPTIONS["gossip"])
    runner.await_steps("stopped", process)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 128 + 15, err
    step = step_of(latest(runner.folder / "stopped" / "checkpoints"))
    # The checkpoint is of the slowest rank, and rank 0 alone was waited for.
    assert 1 <= step < 100_000
    code, out, err = finish(runner.start(*runner.again("stopped"), "--stop-at", str(step + 2)))
    assert code == 0, err
    assert f"resume proven: step {step + 1}" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategy", "fedfix", "--fedfix.importance", "1", "2", "3"], "one number above 0 for each of the 2 ranks"),
        (["--strategy", "dadao", "--optimizer", "adamw"], "--optimizer adamw does not fit strategy dadao"),
        (["--strategy", "gossip", "--gossip.graph", "rign"], "did you mean 'ring'"),
    ],
)
def test_what_can_not_work_is_refused(runner: CommandRunner, flags: list[str], message: str) -> None:
    code, _, err = finish(runner.start("train", *runner.flags("refused"), *flags))
    assert code == 2 and message in err, err
