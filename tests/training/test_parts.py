"""The small parts of a run: learning rate, metrics, checkpoints, run directory, progress, hardware."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from thinwire.compare.watch import MetricsTail
from thinwire.errors import ConfigError
from thinwire.launch import machine
from thinwire.launch.check_parts import check_fault
from thinwire.optim.schedule import lr_at
from thinwire.report.metrics import MembershipEvent, MetricsWriter, StepMetrics, medians, read_events, read_metrics
from thinwire.report.progress import Progress
from thinwire.report.run import read_run
from thinwire.run.config import TrainConfig
from thinwire.run.effects import late_rows, resume_rows, sparse_rows, stretched_rows, unused_rows
from thinwire.run.run import Run
from thinwire.run.run_dir import RunDir
from thinwire.training.proof import Proof, ResumeDriftError
from thinwire.training.reporter import Reporter


def record(step: int, loss: float = 2.0) -> StepMetrics:
    return StepMetrics(step, loss, step * 10, 0.5 + step, 0.3, 0.2, 100 * step, 100, 1e-3, 1.0)


def test_learning_rate_warms_up_then_falls_to_a_tenth() -> None:
    rates = [lr_at(step, peak=1.0, num_warmup_steps=10, num_steps=110) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[59] == pytest.approx((1.0 + 0.1) / 2)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert lr_at(1, peak=1.0, num_warmup_steps=0, num_steps=1) == pytest.approx(0.1)


def test_metrics_survive_and_resume_cuts_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, 0)
    for step in (1, 2, 3):
        writer.write(record(step, math.nan if step == 2 else 2.0))
    # Not closed: every line is on disk already.
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert json.loads(lines[1])["loss"] is None
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    resumed = MetricsWriter(path, 2)
    resumed.write(record(3, 1.0))
    assert [(r.step, r.loss) for r in read_metrics(path)[::2]] == [(1, 2.0), (3, 1.0)]
    assert math.isnan(read_metrics(path)[1].loss) and resumed.records[0] == record(1)


def test_a_full_disk_keeps_lines_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TrainConfig(run_dir=str(tmp_path), tokens_per_step=10)
    reporter = Reporter(config, first_step=0, world_size=1, uncompressed_bytes=0.0, rows=[])
    disk = reporter.metrics._file
    with Path("/dev/full").open("ab", buffering=0) as full:
        reporter.metrics._file = full
        reporter.step(record(1))
        reporter.step(record(2))
        reporter.metrics._file = disk
    assert capsys.readouterr().out.count("No space left on device; training goes on") == 1
    reporter.step(record(3))
    reporter.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [record(1), record(2), record(3)]


def test_figures_are_of_the_steps_since_the_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TrainConfig(run_dir=str(tmp_path), tokens_per_step=10, strategy="fsdp")
    ending = {"skipped_steps": 0, "heldout_loss": None, "stopped": "", "sample": "", "parameters": 1}
    for first_step, last_step, sent_bytes, step_s in (
        (0, 5, 100, 2.0),
        (5, 8, 800, 4.0),
        (8, 8, 800, 4.0),
        (8, 9, 800, 4.0),
    ):
        plain = 1600.0 if first_step < last_step else 0.0
        reporter = Reporter(config, first_step=first_step, world_size=1, uncompressed_bytes=plain, rows=[])
        for step in range(first_step + 1, last_step + 1):
            reporter.step(replace(record(step), sent_bytes=sent_bytes, step_s=step_s))
        reporter.finish(step=last_step, peak_rss_bytes=1, **ending)  # type: ignore[arg-type]
        summary, run = json.loads((tmp_path / "summary.json").read_text()), read_run(tmp_path)
        assert summary["resumed_after"] == first_step and len(run.steps) == last_step
        printed = capsys.readouterr().out
        ratio = printed.partition("fp32 1.60 kB: ")[2].splitlines()
        if first_step < last_step:
            assert (summary["sent_bytes_per_step"], summary["step_s"]) == (sent_bytes, step_s)
            assert summary["tokens_per_s"] == 10 / step_s
            is_one = last_step == first_step + 1
            assert ratio[0] == (
                "one step is no measure of the ratio" if is_one else f"{1600 / sent_bytes:.1f} times fewer bytes"
            )
            assert (run.typical("sent_bytes"), run.typical("step_s")) == (sent_bytes, step_s)
        else:
            assert summary["sent_bytes_per_step"] == run.typical("sent_bytes") == 100, "no step: those before"
            assert "no step was left to take" in printed and summary["uncompressed_bytes_per_step"] == 1600


def test_bytes_are_beside_those_of_what_would_send_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ending = {"skipped_steps": 0, "heldout_loss": None, "stopped": "", "sample": "", "parameters": 1}
    for mesh, strategy, words in (
        ("data=2", "zero", "sent in a median step: 400 B, in fp32 1.60 kB: 4.0 times fewer bytes"),
        ("data=1,expert=2", "zero", "400 B, whole models that average gradients in fp32 1.60 kB: 4.0 times"),
        ("data=1,sequence=2", "zero", "400 B, whole models that average gradients in fp32 1.60 kB: 4.0 times"),
        ("data=2", "diloco", "sent in a mean step: 400 B"),
    ):
        config = TrainConfig(run_dir=str(tmp_path), tokens_per_step=10, workers=2, mesh=mesh, strategy=strategy)
        reporter = Reporter(config, first_step=0, world_size=2, uncompressed_bytes=1600.0, rows=[])
        for step in (1, 2, 3):
            reporter.step(replace(record(step), sent_bytes=400))
        reporter.finish(step=3, peak_rss_bytes=1, **ending)  # type: ignore[arg-type]
        assert words in capsys.readouterr().out
        assert ("whole models" in (tmp_path / "report.html").read_text()) == ("data=1" in mesh)
        (tmp_path / "metrics.jsonl").unlink()


def test_changes_of_membership_stand_between_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    changes = [MembershipEvent(step, step, [0], [1], [], 1.5, "nothing") for step in (1, 3)]
    tail, writer = MetricsTail(path), MetricsWriter(path, 0)
    for line in (record(1), changes[0], record(2), record(3), changes[1]):
        writer.write(line)
    assert read_metrics(path) == [record(1), record(2), record(3)] and read_events(path) == changes
    assert [row["step"] for row in tail.new_rows()] == [1, 2, 3], "so does a race"
    resumed = MetricsWriter(path, 2)
    assert resumed.records == [record(1), record(2)] and resumed.events == changes[:1]
    keys = [next(iter(json.loads(line))) for line in path.read_text().splitlines()]
    assert keys == ["step", "event", "step"]
    # What reads steps for plots passes over them.
    assert [row["step"] for row in read_run(tmp_path).steps] == [1, 2]


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("kill rank=2 step=4", {}, "ranks are numbered from 0 to 1"),
        ("kill rank=1 step=40", {}, "the run ends after step 10"),
        ("kill island=1 step=4", {}, "strategy sdp4bit has no islands"),
        ("kill rank=1 step=4", {"strategy": "diloco"}, "name the island too"),
        ("kill island=2 step=4", {"strategy": "diloco"}, "islands are numbered from 0 to 1"),
        ("kill island=1 rank=1 step=4", {"strategy": "diloco"}, "ranks are numbered from 0 to 0"),
        ("kill island=1 rank=0 step=4", {"strategy": "diloco"}, ""),
        ("kil rank=1 step=4", {}, "did you mean 'kill'"),
    ],
)
def test_faults_that_can_not_happen_are_refused(text: str, change: dict[str, Any], message: str) -> None:
    config = TrainConfig(workers=2, steps=10, **change)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_fault(text, config)


def test_metrics_of_other_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {k: v for k, v in asdict(record(1)).items() if k != "codec_s"}
    path.write_text(json.dumps(values | {"from_the_future": 1}) + "\n")
    assert read_metrics(path) == [record(1)]


def test_medians_leave_out_the_first_step() -> None:
    records = [record(step) for step in (1, 2, 3, 4)]
    assert medians(records, "sent_bytes") == {"sent_bytes": 300}
    assert medians(records[:1], "sent_bytes") == {"sent_bytes": 100}
    assert medians([], "sent_bytes") == {"sent_bytes": 0.0}


def test_a_resume_that_drifts_stops_with_both_losses() -> None:
    proof = Proof(2.0, 1e-5, "the same weights")
    assert proof.check(5, 2.0 + 1e-5, allow_drift=False).startswith("resume proven: step 5")
    with pytest.raises(ResumeDriftError, match=r"the loss is 2\.1 and was 2\.0 before: a relative difference of 0\.05"):
        proof.check(5, 2.1, allow_drift=False)
    assert "NOT proven" in proof.check(5, 2.1, allow_drift=True)
    with pytest.raises(ResumeDriftError):
        proof.check(5, math.nan, allow_drift=False)


def test_run_directory_is_not_lost(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "runs" / "a")
    run_dir.check(0, resume=False, overwrite=False)
    assert not run_dir.path.exists(), "checking writes nothing"
    run_dir.claim(0, "steps = 1\n", overwrite=False)
    (run_dir.path / "notes.txt").write_text("mine")
    (run_dir.checkpoints / "step-00000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume.*--overwrite.*a-2"):
        run_dir.check(0, resume=False, overwrite=False)
    run_dir.check(0, resume=True, overwrite=False)
    run_dir.check(1, resume=False, overwrite=False)
    run_dir.claim(0, "steps = 2\n", overwrite=True)
    assert not run_dir.checkpoints.exists()
    assert (run_dir.path / "notes.txt").read_text() == "mine"


def test_run_directory_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        RunDir(tmp_path / "file" / "run").check(0, resume=False, overwrite=False)


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(num_steps=3, tokens_per_step=10, uncompressed_bytes=8e6)
    progress.start_table([("dtype auto", "bf16", "measured [1]"), ("a", "b", "")])
    for step in (1, 2, 3):
        progress.step(record(step))
    progress.close()
    shown = capsys.readouterr().out
    assert "dtype auto: bf16 (measured [1])" in shown
    assert "step 1/3  loss 2.0000" in shown and "step 3/3" in shown and "step 2/3" not in shown
    assert "sent 100 B, fp32 8 MB" in shown and "waiting 0.200 of 1.500 s" in shown
    Progress(3, 10, 8e6, whole=True).step(record(1))
    assert "sent 100 B, whole models in fp32 8 MB" in capsys.readouterr().out


def test_options_without_effect_are_rows() -> None:
    config = TrainConfig(
        strategy="zero", model="hf:x", join="a:1", prompt="x", sample_tokens=0, steps=3, warmup_steps=9,
        stop_at=3,
        tables={"sdp4bit": {"weights": "int8"}, "llama": {"hidden_size": 64}},
    )  # fmt: skip
    rows = {asked: effect for asked, effect, _ in unused_rows(Run.of(config))}
    assert rows == {
        "--sdp4bit.weights": "no effect",
        "--llama.hidden-size": "no effect",
        "--join": "no effect",
        "--prompt": "no effect",
        "--stop-at 3": "no effect",
        "--warmup-steps 9": "never finishes",
    }
    assert not list(unused_rows(Run.of(TrainConfig(tables={"sdp4bit": {"weights": "int8"}}))))


def test_a_run_that_ends_before_its_strategy_begins_says_so() -> None:
    late = TrainConfig(strategy="onebit-adam", steps=40, tables={"onebitadam": {"freeze": 40}})
    assert "its first 40 steps differ from the others, and the run ends after 40" in str(list(late_rows(Run.of(late))))
    assert not list(late_rows(Run.of(TrainConfig(strategy="onebit-adam", steps=40))))
    rarely: dict[str, Any] = {"strategy": "sparseloco", "steps": 1000, "workers": 2}
    ((asked, _, why),) = sparse_rows(Run.of(TrainConfig(**rarely, tables={"sparseloco": {"sync_every": 50}})))
    assert asked == "density 0.01562 every 50 steps"
    assert why == "20 exchanges in 1000 steps send at most 31% of the elements; take topk5% or sync_every 15"
    assert not list(sparse_rows(Run.of(TrainConfig(**rarely))))
    for other in ("diloco", "muloco", "zero"):
        assert not list(sparse_rows(Run.of(TrainConfig(strategy=other, steps=10, workers=2))))
    ((_, _, why),) = sparse_rows(Run.of(TrainConfig(strategy="sparseloco", steps=10, workers=2)))
    assert why.endswith(
        "0 exchanges in 10 steps send at most 0% of the elements; train longer, or take a larger density"
    )
    assert list(late_rows(Run.of(TrainConfig(strategy="lgreco-ef-topk", steps=20))))


def test_changes_on_resume_are_rows() -> None:
    rows = list(resume_rows(TrainConfig(steps=5), TrainConfig(steps=7, seed=1, resume=True)))
    assert rows == [("resume: --steps 7", "7", "was 5 until the checkpoint")]


def test_a_schedule_that_another_number_of_steps_stretches_is_told() -> None:
    """With the rate of the last step that was taken, and that of the next one."""
    ended, longer = TrainConfig(steps=10, lr=1e-3, warmup_steps=1), TrainConfig(steps=40, lr=1e-3, warmup_steps=1)
    ((_, effect, why),) = stretched_rows(ended, longer, 10)
    next_rate = lr_at(11, peak=1e-3, num_warmup_steps=1, num_steps=40)
    assert effect == f"0.0001 at step 10, {next_rate:.3g} at step 11" and next_rate > 8e-4
    assert why == "the schedule is stretched: step 10 was one of 10, and is one of 40"
    assert "shortened" in next(stretched_rows(longer, ended, 5))[2]
    assert not [*stretched_rows(ended, ended, 5), *stretched_rows(longer, ended, 10)]


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert machine.threads_per_worker(3)[0] == 2
    assert machine.threads_per_worker(99)[0] == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert machine.threads_per_worker(3) == (5, "OMP_NUM_THREADS is set")


@pytest.mark.parametrize(("speedup", "chosen"), [(1.5, "bf16"), (1.02, "fp32"), (0.4, "fp32")])
def test_dtype_follows_the_measurement(monkeypatch: pytest.MonkeyPatch, speedup: float, chosen: str) -> None:
    monkeypatch.setattr(machine, "bf16_speedup", lambda threads: speedup)
    assert machine.choose_dtype("auto", 1)[0] == chosen
    assert machine.choose_dtype("fp32", 1) == ("fp32", "")


def test_dtype_is_measured() -> None:
    assert 0 < machine.bf16_speedup(1, repeats=1) < 1000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a process was started")
def test_the_age_of_a_process_is_that_of_the_clock() -> None:
    outer = time.monotonic()
    first = machine.process_age_s()
    inner = time.monotonic()
    time.sleep(0.05)
    inner = time.monotonic() - inner
    passed = machine.process_age_s() - first
    assert first > 0 and inner <= passed <= time.monotonic() - outer
    code = "import time; from thinwire.launch.machine import process_age_s as age; print(age() > time.thread_time())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"
