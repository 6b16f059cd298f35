"""torch's own strategies, ZeRO++, one-byte gradients, and sessions that end by --stop-at, through the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.training.commands import CommandRunner, finish

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
POWERSGD: dict[str, Any] = {"strategy": "powersgd-torch", "torchpowersgd.start_step": 2}
ONE_BYTE: dict[str, Any] = {
    "strategy": "one-byte", "onebyte.samples": 2, "optimizer": "sgd", "lr": 1e-4, "tokens_per_step": 128,
}  # fmt: skip
ZEROPP: dict[str, Any] = {"strategy": "zeropp", "tokens_per_step": 128}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    runner = CommandRunner(tmp_path_factory.mktemp("baselines"))
    yield runner
    runner.close()


def losses(runner: CommandRunner, name: str) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runner.metrics(name)]


@pytest.mark.parametrize("flags", [POWERSGD, ZEROPP, ONE_BYTE], ids=lambda flags: flags["strategy"])
def test_a_run_in_two_sessions_equals_one_in_one(runner: CommandRunner, flags: dict[str, Any]) -> None:
    whole, halves = f"{flags['strategy']}-whole", f"{flags['strategy']}-halves"
    assert "the model goes on" in runner.ranks(whole, **flags)
    assert "stopped by --stop-at 4 after step 4; go on with --resume" in runner.ranks(halves, stop_at=4, **flags)
    stopped = runner.summary(halves)
    assert (stopped["steps"], stopped["stopped"], stopped["heldout_loss"]) == (4, "--stop-at 4", None)
    assert "stop_at" not in (runner.folder / halves / "config.toml").read_text()
    if flags is POWERSGD:
        code, _, err = finish(runner.start(*runner.again(halves), "--stop-at", "3"))
        assert code == 2 and "--stop-at 3: the checkpoint was taken after step 4; nearest: 4" in err
    runner.ranks(halves, resumes=True)
    assert losses(runner, halves) == losses(runner, whole)
    summary = runner.summary(halves)
    assert summary["heldout_loss"] == runner.summary(whole)["heldout_loss"]
    assert summary["stopped"] == "finished" and summary["strategy"] == flags["strategy"]
    assert runner.metrics(whole)[-1]["sent_bytes"] < 0.6 * summary["uncompressed_bytes_per_step"]
    assert (runner.metrics(whole)[-1]["codec_s"] > 0) == (flags is ZEROPP)


def test_ddp_trains_up_to_a_step(runner: CommandRunner) -> None:
    runner.ranks("ddp", strategy="ddp", stop_at=3, checked=True)
    summary = runner.summary("ddp")
    assert (summary["steps"], summary["stopped"], summary["world_size"]) == (3, "--stop-at 3", 2)
    assert len(runner.metrics("ddp")) == 3
    assert ["--checked", "no effect on gradients"] in [row[:2] for row in summary["effects"]]
    # The 24 bytes of a step's agreement may still be on their way when it ends, and count in the next one.
    assert abs(summary["parameters"] * 4 + 24 - summary["sent_bytes_per_step"]) <= 24
