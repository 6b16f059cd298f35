"""A run goes on in another layout, from the checkpoint before a damaged one, and only if it is the same run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.training.commands import THINWIRE, CommandRunner, finish
from thinwire.checkpoint.folder import note_next_loss

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
# A disk that takes no file as large as a rank's part.
FULL_DISK = ["sh", "-c", 'ulimit -f 200; exec "$@"', "sh"]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    runner = CommandRunner(tmp_path_factory.mktemp("resume"))
    yield runner
    runner.close()


def test_another_layout_goes_on_where_the_last_sound_checkpoint_was(runner: CommandRunner) -> None:
    run: dict[str, Any] = {
        "strategy": "zero",
        "steps": 6,
        "checkpoint_every": 2,
        "keep_last": 3,
        "tokens_per_step": 96,
        "lr": 1e-3,
    }
    runner.ranks("run", **run)
    before = runner.metrics("run")
    folder = runner.folder / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "latest", "step-00000002", "step-00000004", "step-00000006",
    ]  # fmt: skip
    part = folder / "step-00000006" / "rank1" / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    (folder / ".step-00000007.tmp").mkdir()
    code, out, err = finish(
        runner.popen(*FULL_DISK, *THINWIRE, *runner.again("run"), "auto", "--strategy", "ddp", "--workers", "3")
    )
    assert code == 1 and "Traceback" not in err and "report: " in out.splitlines()[-1], (out, err)
    told, _, rest = err[err.index("thinwire: ") :].partition("\n")
    assert "rank 0: the end of this run is not saved: the checkpoint of step 6 was not saved: rank" in told, err
    assert told.endswith("; the newest checkpoint is of step 4") and "--resume goes on after step 4" in rest, err
    assert "WARNING: the checkpoint of step 6 was not saved: rank" in out and "training goes on" in out
    assert (folder / "latest").read_text() == "step-00000004" and not list(folder.glob(".step-*"))
    assert "a later checkpoint: passed over: it is damaged" in out and "rank1/__0_0.distcp has" in out
    assert "a later checkpoint: passed over (" in out and ".step-00000007.tmp: its save was cut short" in out
    assert "; steps 5 to 6 are in no sound checkpoint, and are taken again" in out
    assert "goes on after step 4" in out and "resume: weights: carried (from 2 rank(s), in pieces)" in out
    assert "resume: random states: dropped" in out and "resume proven: step 5" in out
    after = runner.metrics("run")
    assert [line["step"] for line in after] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in after] == pytest.approx([line["loss"] for line in before], rel=1e-5)
    # Somebody else's loss.
    (folder / "latest").write_text("step-00000004")
    note_next_loss(folder / "step-00000004", before[4]["loss"] * 1.001)
    code, out, err = finish(runner.start(*runner.again("run"), "--strategy", "zero", "--workers", "2"))
    assert code == 1 and "Traceback" not in err
    assert "the resumed run does not continue the saved one" in err and "--allow-resume-drift" in err
    # Fewer steps than are done.
    code, out, err = finish(runner.start(*runner.again("run"), "--steps", "3"))
    assert code == 2 and "--resume: step 4 is past --steps 3; nearest: --steps 5" in err, err
    code, out, err = finish(runner.start(*runner.again("run"), "--steps", "4", "--dry-run"))
    assert code == 0 and "no step of --steps 4 is left: it measures and reports again, and trains nothing" in out, err
    # The layout of before, and an optimizer that can't take over what was saved.
    other = ["--strategy", "zero", "--workers", "2", "--optimizer", "sgd[momentum=0.5]", "--allow-resume-drift"]
    code, out, err = finish(runner.start(*runner.again("run"), *other))
    assert code == 0, err
    assert "--optimizer sgd[momentum=0.5]: sgd[momentum=0.5] (was adamw until the checkpoint)" in out
    assert "resume: optimizer: exp_avg, exp_avg_sq, step: dropped" in out and "found all of it" not in out


def test_islands_that_can_not_save_their_end_are_not_started_again(runner: CommandRunner) -> None:
    flags = runner.flags("islands", strategy="diloco", steps=4, **{"diloco.sync_every": 2, "eval_sequences": 0})
    code, out, err = finish(runner.popen(*FULL_DISK, *THINWIRE, "train", *flags))
    assert code == 1 and "is started again" not in err and "report: " in out.splitlines()[-1], (out, err)
    for island in range(2):
        assert f"island {island}: rank 0: the end of this run is not saved: the checkpoint of step 4 was not" in err


def test_a_killed_run_goes_on_behind_its_last_step(runner: CommandRunner) -> None:
    run: dict[str, Any] = {
        "strategy": "sdp4bit",
        "sdp4bit.loco": "true",
        "steps": 5,
        "local_size": 1,
        "checkpoint_every": 2,
    }
    runner.ranks("whole", **run)
    disk = runner.folder / "disk"
    durable = {"residency.durable": "true", "store": str(disk), "inject": "kill rank=1 step=4"}
    code, _, err = finish(runner.train("killed", **run, **durable))
    assert code == 1 and "--resume goes on after step 3, which the durable run keeps" in err, err
    (runner.folder / "killed" / "metrics.jsonl").unlink()
    # As if it had once had more ranks.
    (kept,) = disk.glob("*/rank1")
    shutil.copytree(kept, kept.with_name("rank2"))
    code, out, err = finish(runner.start(*runner.again("killed")))
    assert code == 0, err
    assert "resume: found all of it" in out and "goes on after the last step" in out, out
    # Its checkpoint is of step 2.
    assert [line["step"] for line in runner.metrics("killed")] == [4, 5]
    before, after = runner.metrics("whole")[-2:], runner.metrics("killed")
    assert [line["loss"] for line in after] == [line["loss"] for line in before]
    assert after[-1]["grad_norm"] == before[-1]["grad_norm"]
    assert f"older steps of this durable run, in {kept.with_name('rank2')}" in out and not list(disk.iterdir())
