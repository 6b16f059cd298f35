"""Runs with islands through the command line: launchers below a launcher, a meeting, a world for each island."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.training.commands import CommandRunner, finish
from tests.workers import free_port
from thinwire.checkpoint import Source
from thinwire.checkpoint.folder import point_to
from thinwire.convert.saved import load_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    runner = CommandRunner(tmp_path_factory.mktemp("islands"))
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def whole(runner: CommandRunner) -> str:
    """Two islands of one worker, with a checkpoint in the middle; its standard output."""
    flags = {"strategy": "diloco", "diloco.sync_every": 4, "checkpoint_every": 3, "seed": 1}
    code, out, err = finish(runner.train("whole", **flags))
    assert code == 0, err
    return out


def losses(runner: CommandRunner, name: str) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runner.metrics(name)]


def summary(runner: CommandRunner, name: str) -> dict[str, Any]:
    return json.loads((runner.folder / name / "summary.json").read_text())


def test_every_worker_is_an_island(runner: CommandRunner, whole: str) -> None:
    first, second = summary(runner, "whole"), summary(runner, "whole/island-1")
    assert first["world_size"] == 2 and first["tokens"] == 6 * 64 and first["strategy"] == "diloco"
    assert first["heldout_loss"] == second["heldout_loss"], "both measure the outer parameters"
    assert losses(runner, "whole") != losses(runner, "whole/island-1"), "each has data of its own"
    sent = [line["sent_bytes"] for line in runner.metrics("whole")]
    # One exchange in six steps, in fp32, to one other island; no other step sends anything, and one comes at the end.
    message = 32 + 4 * first["parameters"] + 1
    assert [num > 0 for num in sent] == [False] * 3 + [True] + [False] * 2
    assert all(message <= num < message + 8 * 4 for num in (sent[3], first["last_exchange_bytes"]))
    assert f"the mean of the islands' weights, {first['last_exchange_bytes'] / 1e6:.3f} MB sent for it" in whole
    assert "2 island(s) of 1 rank(s)" in whole and "strategy diloco: ddp inside each island" in whole
    assert not any(runner.folder.joinpath("whole").glob("island-2"))


def test_resume_equals_the_uninterrupted_run_bit_for_bit(runner: CommandRunner, whole: str) -> None:
    again = runner.folder / "again"
    shutil.copytree(runner.folder / "whole", again)
    for folder in (again, again / "island-1"):
        (folder / "summary.json").unlink()
    # What one island can't go on from, the others must not either.
    part = again / "island-1/checkpoints/step-00000006/rank0/__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    # What export takes: the outer parameters, where the islands' own differ since the last exchange.
    states = [Source(folder / "checkpoints" / "step-00000003", 0) for folder in (again, again / "island-1")]
    for folder in (again, again / "island-1"):
        point_to(folder / "checkpoints" / "step-00000003")
    exported = [dict(load_run(str(folder)).model.named_parameters()) for folder in (again, again / "island-1")]
    assert all(torch.equal(exported[0][name], tensor) for name, tensor in exported[1].items())
    inner = [dict(state.weights()) for state in states]
    assert not any(torch.equal(inner[0][name], tensor) for name, tensor in inner[1].items() if tensor.dim() > 1)
    for folder in (again, again / "island-1"):
        point_to(folder / "checkpoints" / "step-00000006")
    # With another term than before, which is nothing to the state.
    code, out, err = finish(runner.start(*runner.again("again"), "--timeout", "41"))
    assert code == 0, err
    assert "outer parameters: start anew" not in out
    assert "goes on after step 3 (the last that every island has; their last ones are of steps [3, 6])" in out
    assert "a later checkpoint of island 1: passed over: it is damaged" in out
    told = (again / "island-1/logs/launcher.out").read_text()
    assert "a later checkpoint: passed over: it is damaged" in told and "resume proven: step 4" in told
    for name in ("again", "again/island-1"):
        assert losses(runner, name) == losses(runner, name.replace("again", "whole"))
        assert summary(runner, name)["heldout_loss"] == summary(runner, "whole")["heldout_loss"]


def test_from_one_method_to_another_and_out_of_islands_and_into_them(runner: CommandRunner, whole: str) -> None:
    """After step 3, before any exchange, the islands' weights differ: all that go on take their mean."""
    for name in ("streaming", "left"):
        shutil.copytree(runner.folder / "whole", runner.folder / name)
        for folder in (runner.folder / name, runner.folder / name / "island-1"):
            point_to(folder / "checkpoints" / "step-00000003")
    streaming = runner.start(*runner.again("streaming"), "--strategy", "streaming-diloco", "--stop-at", "4")
    code, out, err = finish(streaming)
    assert code == 0, err
    told = (runner.folder / "streaming/island-1/logs/launcher.out").read_text()
    for text in (out, told):
        assert "weights of the islands: transformed (all start from the mean of 2 islands' weights)" in text
        assert "resume proven: step 4" in text and "a relative difference of 0)" in text
    code, out, err = finish(runner.start(*runner.again("left"), "--strategy", "ddp", "--workers", "1"))
    assert code == 0, err
    assert "weights of the islands: transformed (the mean of those of islands [0, 1])" in out
    assert "resume proof: none (the weights are the mean of 2 islands', with which no loss was taken)" in out
    of_islands = [losses(runner, name)[3][1] for name in ("streaming", "streaming/island-1")]
    assert losses(runner, "left")[3][1] == pytest.approx(sum(of_islands) / 2, rel=1e-5)
    assert losses(runner, "left")[3][1] != pytest.approx(losses(runner, "whole")[3][1], rel=1e-5)
    assert of_islands[0] != losses(runner, "whole")[3][1]
    # That run has ended, and knows its next loss all the same; its last islands' checkpoints are of long ago.
    flags = ["--strategy", "diloco", "--workers", "2", "--diloco.sync-every", "2", "--steps", "7"]
    code, out, err = finish(runner.start(*runner.again("left"), *flags))
    assert code == 0, err
    assert "resume: islands: begun (all 2 start from the run's checkpoint)" in out
    assert "weights of the islands: carried (they are the same bits on all islands)" in out
    assert "exchange of each fragment: every 2 steps" in out and "resume proven: step 7" in out


def test_torchrun_and_two_machines_train_the_same(runner: CommandRunner, whole: str) -> None:
    own: dict[str, Any] = {"strategy": "diloco", "seed": 1, "diloco.sync_every": 4}
    meeting = f"127.0.0.1:{free_port()}"
    # The second comes first, and waits.
    commands = [runner.train(f"machine{node}", workers=1, nodes=2, node=node, join=meeting, **own) for node in (1, 0)]
    ended = [(0, runner.ranks("torchrun", **own), ""), *map(finish, commands)]
    for code, out, err in ended:
        assert code == 0, err
        assert "strategy diloco: ddp inside each island" in out and "held-out loss" in out, "each has a terminal"
    for folders in (("torchrun", "torchrun/island-1"), ("machine0", "machine1/island-1")):
        for name, same in zip(folders, ("whole", "whole/island-1"), strict=True):
            assert losses(runner, name) == losses(runner, same)
            assert summary(runner, name)["heldout_loss"] == summary(runner, same)["heldout_loss"]
