"""`--experts.parallel` on the command line: as one process, and checkpoints move to any number of ranks and slices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.commands import check_refused, train_ranks
from thinwire.checkpoint.folder import latest
from thinwire.checkpoint.source import read_weights
from thinwire.report.metrics import OF_MESSAGES, TrafficEvent, WayEvent, read_events
from thinwire.report.units import MISSING, bytes_text, seconds_text

STEPS, SAVED = 6, 3
SMALL = (
    "--model", "moe-tiny", "--seq-len", "22", "--micro-batch", "2", "--tokens-per-step", "176", "--lr", "0.003",
    "--moe.num-hidden-layers", "2", "--moe.router-aux-loss-coef", "0", "--moe.router", "noisy", "--dtype", "fp32",
    "--eval-sequences", "4",
    "--sample-tokens", "8", "--timeout", "60", "--local-size", "1", "--steps", str(STEPS),
)  # fmt: skip
OPEN = "--experts.move auto --experts.route auto --experts.chunks auto"
AGAIN = "--activations recompute"
TIGHT = "--experts.capacity 0.75 --moe.batch-priority True"
LOSSY = (
    "--strategy sdp4bit --experts.parallel 2 --experts.dispatch int8 --experts.combine int8/64:nearest "
    "--experts.gradients int8/64"
)

DRAWN = (
    "--strategy zero --micro-batch 4 --stop-at 1 "
    "--experts.dispatch int2/16 --experts.combine int2/16 --experts.gradients int4/32"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("experts")
    stop = f"--stop-at {SAVED}"
    rows: list[tuple[str, int, str, str]] = [
        ("alone", 1, "--strategy zero", ""),
        ("four", 4, f"--strategy zero --mesh data=2,expert=2 --experts.slices 2 {stop} {AGAIN}", ""),
        ("whole", 2, f"--strategy zero --mesh data=1,expert=2 --experts.slices 1 {OPEN}", "four"),
        ("one", 1, "--strategy zero --mesh data=1", "four"),
        ("found", 4, f"--strategy zero --sequence.parallel 2 --experts.parallel auto --stop-at 1 {AGAIN}", ""),
        ("tight", 2, f"--strategy zero --experts.parallel 2 --experts.chunks 3 {TIGHT} {stop}", ""),
        ("lossy", 2, LOSSY, ""),
        ("lossy-part", 2, f"{LOSSY} {stop}", ""),
        ("lossy-on", 2, LOSSY, "lossy-part"),
        ("lossy-one", 1, "--strategy sdp4bit --experts.parallel 1", "lossy-part"),
        ("drawn-two", 2, f"{DRAWN} --experts.parallel 2", ""),
        ("drawn-four", 4, f"{DRAWN} --sequence.parallel 2 --experts.parallel 2", ""),
    ]
    found: dict[str, dict[str, Any]] = {}
    for name, num_ranks, flags, origin in rows:
        run = train_ranks(folder, name, num_ranks, [*SMALL, *flags.split()], origin)
        found[name] = run | {"losses": [line["loss"] for line in run["steps"].values()]}
    return found


def test_experts_train_as_one_process_and_move_to_other_layouts(runs: dict[str, dict[str, Any]]) -> None:
    alone = runs["alone"]
    for name in ("whole", "one"):
        run = runs[name]
        assert run["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert run["heldout_loss"] == pytest.approx(alone["heldout_loss"], rel=1e-5)
        assert "resume proven" in run["printed"] and "within 1e-05" in run["printed"]
    # What the start says that a step sends is about what it sends.
    # Few experts take as many rows as a capacity lets them.
    for name, most in (("four", 0.1), ("lossy", 0.1), ("tight", 0.15)):
        printed, steps = runs[name]["printed"], runs[name]["steps"].values()
        told = re.findall(r"(?:sent per rank and step|a step, besides): (?:about )?([\d.]+) MB", printed)
        sent = sorted(line["sent_bytes"] / 1e6 for line in steps)[len(steps) // 2]
        assert len(told) == 2 and sum(map(float, told)) == pytest.approx(sent, rel=most), name
    assert "2 layers keep their inputs" in runs["four"]["printed"]
    assert "2 ranks a sequence" in runs["found"]["printed"]
    found = r"--experts.parallel auto: (1|2) \(seconds of a step's links and experts: "
    assert re.search(found, runs["found"]["printed"])
    way = rf"{OPEN}: (tokens|experts), linear, \d+ chunks? \(a simulated layer, forward and backward: "
    assert re.search(way, runs["whole"]["printed"])
    check_streams(runs)
    kept = (runs["whole"]["folder"] / "config.toml").read_text().partition("[experts]")[2]
    # What is open stays so.
    assert all(f'{name} = "auto"' in kept for name in ("move", "route", "chunks"))
    seconds = [line["experts_s"] for line in runs["whole"]["steps"].values()]
    assert all(value > 0 for value in seconds) and not runs["alone"]["steps"][1]["experts_s"]
    assert runs["whole"]["steps"][STEPS]["predicted_experts_s"] > 0
    # A way needs the rows, whether or not they are balanced.
    assert runs["whole"]["steps"][STEPS]["needed_capacity"] > 1
    # Where the number of ranks alone is open, too, the page says how rows travel.
    start = read_events(runs["found"]["folder"] / "metrics.jsonl")[0]
    assert isinstance(start, WayEvent) and start.after_step == 0 and start.why.startswith("at the start: ")
    assert f"<td>0</td><td>{start.way}</td>" in (runs["found"]["folder"] / "report.html").read_text()
    assert runs["found"]["losses"] == pytest.approx(alone["losses"][:1], rel=1e-5)
    assert "in slices of 1/2" in runs["four"]["printed"] and "4 of 8 experts a rank (no" in runs["whole"]["printed"]
    # What `zero` would send for the whole model, whatever is sent.
    assert runs["whole"]["uncompressed_bytes_per_step"] == 8 * runs["whole"]["parameters"] / 2


def parts_of(run: dict[str, Any]) -> list[TrafficEvent]:
    """The messages of each part of a run."""
    events = read_events(run["folder"] / "metrics.jsonl")
    return [*{each.first_step: each for each in events if isinstance(each, TrafficEvent)}.values()]


def check_streams(runs: dict[str, dict[str, Any]]) -> None:
    """Each message has its seconds beside its bytes, and predicted ones where links were measured."""
    for name, predicts in (("whole", True), ("four", False)):
        run = runs[name]
        part = parts_of(run)[-1]
        sent, seconds, predicted = (getattr(part, key) for key in OF_MESSAGES)
        assert sent.keys() == seconds.keys() and bool(predicted) == predicts
        assert predicted.keys() <= sent.keys() and all(value > 0 for value in [*seconds.values(), *predicted.values()])
        # A message is under way in a part of the step.
        step_s = sum(line["step_s"] for line in run["steps"].values()) / len(run["steps"])
        assert all(value < step_s for value in seconds.values())
        page = (run["folder"] / "report.html").read_text()
        for key in sent:
            measured = "</td><td>".join((*key.split(", "), bytes_text(sent[key]), seconds_text(seconds[key])))
            told = seconds_text(predicted[key]) if key in predicted else MISSING
            assert f"<td>{measured}</td><td>{told}</td>" in page
    # A run that stops and goes on has the messages of both parts; one process sends none.
    first, last = parts_of(runs["whole"])
    assert (first.after_step, last.first_step, last.after_step) == (SAVED, SAVED, STEPS)
    for key, value in runs["whole"]["sent_by"].items():
        assert value == pytest.approx((first.sent_by.get(key, 0) + last.sent_by.get(key, 0)) / 2)
    assert runs["one"]["sent_by"] == first.sent_by == runs["four"]["sent_by"]
    assert "Messages of rank 0" in (runs["one"]["folder"] / "report.html").read_text()
    # The way in use at the end, measured in the steps since; the first of them warms up.
    ways = [each for each in read_events(runs["whole"]["folder"] / "metrics.jsonl") if isinstance(each, WayEvent)]
    assert ways[-1].measured_s > 0 or ways[-1].after_step > STEPS - 3
    # Forwards are computed twice; only rows to their experts have numbers in front.
    sent = runs["four"]["sent_by"]
    back = sent["combine_gradients, inter"]
    assert sent["dispatch_gradients, inter"] == back and sent["combine, inter"] == 2 * back < sent["dispatch, inter"]
    assert sent.keys() >= {"gradients, inter", "weights, inter"}


def test_rows_are_rounded_alike_on_two_ranks_and_on_four_that_share_sequences(runs: dict[str, dict[str, Any]]) -> None:
    two, four = (next(iter(runs[name]["steps"].values())) for name in ("drawn-two", "drawn-four"))
    for what in ("loss", "grad_norm"):
        assert two[what] == pytest.approx(four[what], rel=2e-6)


def test_rounded_rows_resume_bit_for_bit_and_are_exact_on_one_process(runs: dict[str, dict[str, Any]]) -> None:
    whole, resumed, one = runs["lossy"], runs["lossy-on"], runs["lossy-one"]
    assert whole["losses"] == resumed["losses"] and whole["heldout_loss"] == resumed["heldout_loss"]
    assert "experts dispatch int8: int8/64 (groups end where a row ends)" in whole["printed"]
    exact = runs["alone"]["losses"]
    assert whole["losses"] == pytest.approx(exact, rel=0.05) and whole["losses"] != pytest.approx(exact, rel=1e-6)
    assert "codecs round differently" in one["printed"] and "resume proven" in one["printed"]
    assert one["losses"] == pytest.approx(whole["losses"], rel=0.05)


def test_a_capacity_drops_rows_which_the_run_counts(runs: dict[str, dict[str, Any]]) -> None:
    tight = runs["tight"]
    rows = "capacity_factor 0.75: 8 rows of an expert, of a rank's 44 tokens: those of the highest scores"
    assert rows in tight["printed"] and "in 3 chunks" in tight["printed"]
    config = (tight["folder"] / "config.toml").read_text()
    assert "capacity_factor = 0.75" in config.partition("[moe]")[2] and "\ncapacity =" not in config
    lines = tight["steps"].values()
    assert all(0 < line["dropped_rows"] < 0.7 and line["needed_capacity"] > 0.75 for line in lines)
    assert "Rows of experts" in (tight["folder"] / "report.html").read_text()
    assert not any(line["dropped_rows"] or line["needed_capacity"] for line in runs["alone"]["steps"].values())


def test_a_checkpoint_holds_whole_experts_which_export_reads(runs: dict[str, dict[str, Any]]) -> None:
    folders = [latest(runs[name]["folder"] / "checkpoints") for name in ("lossy", "alone")]
    halves, whole = (dict(read_weights(folder)) for folder in folders if folder is not None)
    assert {name: tensor.shape for name, tensor in halves.items()} == {n: tensor.shape for n, tensor in whole.items()}
    for name, tensor in halves.items():
        assert not name.endswith("gate_proj") or float((tensor - whole[name]).abs().max()) < 0.02


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--workers 4 --experts.parallel 4 --moe.num-local-experts 6", "each rank needs as many of the 6 experts"),
        (
            "--workers 4 --experts.parallel 4 --moe.num-local-experts 6",
            "nearest: --experts.parallel 2, or --experts.slices 2",
        ),
        (
            "--workers 8 --experts.parallel 8 --moe.num-local-experts 6",
            "nearest: --experts.parallel 2, or --experts.slices 4",
        ),
        (
            "--workers 8 --local-size 2 --experts.parallel 8 --experts.slices 4 --experts.route once",
            "route 'once' with slices 4 on nodes of 2 ranks: an expert must lie in one node; nearest: route 'linear'",
        ),
        (
            "--workers 8 --local-size 4 --experts.parallel 4 --sequence.parallel 2 --experts.slices 4 "
            "--experts.route once",
            "route 'once' with slices 4 on nodes of 2 ranks",
        ),
        ("--workers 4 --experts.parallel 3", "must divide the 4 ranks; nearest: --experts.parallel 2"),
        ("--workers 4 --mesh data=2,expert=2 --experts.parallel 4", "give one of them"),
        ("--workers 4 --experts.parallel 4 --experts.slices 3", "and the 4 ranks of --experts.parallel; nearest: 2"),
        ("--workers 2 --experts.parallel 2 --experts.dispatch int9", "--experts.dispatch int9: integer bits 9"),
        (
            "--workers 2 --experts.parallel 2 --experts.move expert",
            "--experts.move expert: no such choice; did you mean",
        ),
        ("--workers 2 --experts.dispatch nonsense", "--experts.dispatch nonsense: no codec is"),
        ("--workers 2 --experts.parallel 2 --experts.move experts --experts.combine bf16", "nearest: 'fp32'"),
        (
            "--workers 2 --experts.parallel 2 --experts.gradients int8/128",
            "--experts.gradients int8/128: its groups of 128 must end where the rows of 64 end; "
            "nearest: --experts.gradients int8/64",
        ),
        ("--workers 2 --experts.parallel 2 --experts.chunks 40", "chunks 40: must be 1 to 32; nearest: 32"),
        ("--workers 2 --moe.capacity-factor 0.05 --micro-batch 1", "would take no row; nearest: 0.5"),
        (
            "--workers 2 --experts.capacity 2 --moe.capacity-factor 1.5",
            "--experts.capacity 2 and --moe.capacity-factor 1.5: both are the most rows of an expert; nearest: "
            "--experts.capacity 1.5",
        ),
        ("--experts.capacity 2 --model tiny", "--experts.capacity 2 for --model tiny: only thinwire's own mixtures"),
        ("--experts.capacity nan", "capacity_factor=nan: must be a finite number; nearest is 0.0"),
        ("--workers 2 --experts.parallel 2 --strategy ddp", "those that can: zero, zero-bf16"),
        (
            "--workers 4 --experts.parallel 4 --sequence.parallel 2",
            "must divide the 2 ranks that --sequence.parallel 2 leaves; nearest: --experts.parallel 2, or "
            "--sequence.parallel 1",
        ),
        ("--workers 4 --strategy diloco --local-size 2 --experts.parallel 2", "ddp in diloco can't train experts"),
        (
            "--workers 4 --strategy diloco --inner zero --local-size 2 --experts.parallel auto",
            "--experts.* auto beside islands: not supported; nearest: state them",
        ),
        ("--workers 4 --experts.parallel auto --mesh data=4", "finds the expert axis: leave --mesh out"),
        ("--workers 4 --experts.parallel automatic", "must be a whole number or auto, such as 1"),
        ("--workers 4 --experts.parallel 2 --stages 2", "one run can't have both; nearest: --stages 1"),
        ("--workers 4 --mesh data=1,expert=2,tensor=2", "on a tensor axis: not supported"),
        ("--workers 2 --experts.parallel 2 --model tiny", "--model tiny has no experts that can lie on several ranks"),
    ],
)
def test_what_can_not_work_is_told_before_anything_starts(
    flags: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = "" if "--strategy" in flags else "--strategy zero "
    given += "" if "--model" in flags else "--model moe-tiny "
    check_refused(tmp_path, f"--seq-len 16 {given}{flags}".split(), re.escape(words), monkeypatch)
