"""`--stages` on the command line: as one process, and checkpoints move between any stages, replicas and plans."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.commands import RunsOfRanks, check_refused
from thinwire.checkpoint import Source, latest
from thinwire.report.timeline import ROWS as ROWS_DRAWN

SAVED, STEPS = 2, 5
SMALL = (
    "--model", "tiny", "--seq-len", "16", "--micro-batch", "2", "--tokens-per-step", "128", "--lr", "0.003",
    "--llama.num-hidden-layers", "4", "--llama.tie-word-embeddings", "True", "--dtype", "fp32",
    "--eval-sequences", "8", "--sample-tokens", "2", "--timeout", "120", "--local-size", "1",
    "--steps", str(STEPS),
)  # fmt: skip
# Wrong, each by itself.
NO_STEP = ("--pipeline.backward", "int4/7", "--pipeline.in-flight", "0", "--tokens-per-step", "100")
EXACT = "--pipeline.forward fp32 --pipeline.backward fp32"
STOP = f"--stop-at {SAVED}"
# A step that changes no weight: what is saved after it is what was loaded.
STILL = f"--stop-at {SAVED + 1} --lr 1e-30 --allow-resume-drift"


def weights(run: dict[str, Any]) -> dict[str, torch.Tensor]:
    checkpoint = latest(run["folder"] / "checkpoints")
    assert checkpoint is not None
    return dict(Source(checkpoint, 0).weights())


ROWS = {
    "alone": (1, "--strategy zero", ""),
    "four": (4, f"--strategy zero --stages 4 {EXACT} {STOP}", ""),
    "zero": (2, "--strategy zero --stages 1", "four"),
    "ddp": (4, f"--strategy ddp --mesh pipeline=2,data=2 --pipeline.plan 1f1b {EXACT}", "four"),
    "lossy": (4, f"--strategy sdp4bit --stages 2 {STOP}", ""),
    "lossy-on": (4, "--strategy sdp4bit --stages 2", "lossy"),
    "kept": (4, f"--strategy sdp4bit --stages 2 {STILL}", "four"),
    "back": (2, f"--strategy zero --stages 1 {STILL}", "lossy"),
    "first": (2, f"--strategy zero --stages 2 --pipeline.head first --pipeline.plan fitted {STILL}", "lossy"),
    "spread": (4, f"--strategy zero --stages 2 --pipeline.head spread --pipeline.plan 1f1b {EXACT}", "four"),
    "spread-lossy": (4, f"--strategy sdp4bit --stages 2 --pipeline.head spread --pipeline.barriers 2 {STOP}", ""),
    "spread-back": (2, f"--strategy zero --stages 2 {STILL}", "spread-lossy"),
    "tensor": (4, f"--strategy sdp4bit --stages 2 --tensor 2 --local-size 2 {EXACT}", "four"),
    "tensor-still": (4, f"--strategy zero --stages 2 --tensor 2 --local-size 2 {STILL}", "lossy"),
    "auto": (4, f"--strategy zero --stages auto --tensor auto --local-size 2 {EXACT}", ""),
    "replicas": (4, f"--strategy zero --stages 2 --local-size 2 --pipeline.across replicas {EXACT}", "four"),
    "across": (4, f"--strategy zero --stages 2 --local-size 2 {EXACT}", ""),
    "skip": (4, f"--strategy zero --stages 4 --pipeline.head first --pipeline.skip 0.25 {STOP}", ""),
    "skip-on": (4, "--strategy zero --stages 4 --pipeline.head first --pipeline.skip 0.25", "skip"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunsOfRanks:
    return RunsOfRanks(tmp_path_factory.mktemp("stages"), ROWS, SMALL)


def test_stages_change_no_loss_and_no_norm(runs: RunsOfRanks) -> None:
    for name in ("four", "zero", "ddp", "tensor", "spread", "replicas", "across"):
        for step, found in runs[name]["steps"].items():
            for key in ("loss", "grad_norm"):
                assert found[key] == pytest.approx(runs["alone"]["steps"][step][key], rel=2e-5), (name, step, key)
    for name in ("zero", "ddp", "tensor", "spread", "replicas"):
        assert runs[name]["heldout_loss"] == pytest.approx(runs["alone"]["heldout_loss"], rel=1e-5)
        assert "resume proven" in runs[name]["printed"]
    assert all(runs[name]["sample"] for name in ("ddp", "tensor", "spread"))
    assert "parameters cut over 2 ranks" in runs["tensor"]["printed"]


def test_ranks_draw_alike_on_a_tensor_axis_and_apart_on_stages(runs: RunsOfRanks) -> None:
    # As many ranks had saved their states, on another mesh.
    assert "a mesh of pipeline=4,data=1 had them and this is pipeline=2,data=1,tensor=2" in runs["tensor"]["printed"]
    checkpoint = latest(runs["tensor"]["folder"] / "checkpoints")
    assert checkpoint is not None
    states = [Source(checkpoint, rank).own("trainer", rank=rank)["rng"].tolist() for rank in range(4)]
    assert states[0] == states[1] != states[2] == states[3]


def test_stages_that_are_chosen_are_said_kept_and_change_no_loss(runs: RunsOfRanks) -> None:
    run, config = runs["auto"], tomllib.loads((runs["auto"]["folder"] / "config.toml").read_text())
    assert config["stages"] in (1, 2, 4) and config["micro_batch"] in (1, 2) and config["tokens_per_step"] == 128
    assert config.get("tensor", 1) in (1, 2) and "--stages auto: --" in run["printed"]
    assert f"--micro-batch {config['micro_batch']} --strategy zero" in run["printed"]
    assert "--stages auto: measuring links" in run["printed"] and "FLOP/s a rank" in run["printed"]
    # It is held against its prediction, as any run under a plan.
    assert config["plan"] == str(run["folder"] / "plan.json") and (run["folder"] / "plan-trace.json").is_file()
    for step, found in run["steps"].items():
        assert found["loss"] == pytest.approx(runs["alone"]["steps"][step]["loss"], rel=2e-5)


def test_what_crosses_nodes_is_predicted_said_and_kept(runs: RunsOfRanks) -> None:
    config = tomllib.loads((runs["across"]["folder"] / "config.toml").read_text())
    across = config["pipeline"]["across"]
    assert across in ("stages", "replicas")
    printed = runs["across"]["printed"]
    assert f"across auto: {across} cross nodes (predicted: " in printed
    # The one with fewer predicted seconds.
    found = re.search(r"\(predicted: ([\d.]+) (m?s) a step with stages, ([\d.]+) (m?s) a step with replicas\)", printed)
    assert found is not None, printed
    pairs = found.groups()[:2], found.groups()[2:]
    stages_s, replicas_s = (float(num) / (1e3 if unit == "ms" else 1) for num, unit in pairs)
    assert (stages_s <= replicas_s) if across == "stages" else (replicas_s <= stages_s)
    # The first pipeline lies on the first node: with the others it shares no link.
    assert "2 replicas: topology: 2 node(s) x 1 rank(s)" in runs["replicas"]["printed"]
    assert "across auto" not in runs["replicas"]["printed"]


def test_a_pipeline_goes_on_as_it_was(runs: RunsOfRanks) -> None:
    assert "resume: found all of it" in runs["lossy-on"]["printed"]
    assert "a relative difference of 0\n" in runs["lossy-on"]["printed"]


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        pytest.param("kept", "four", marks=pytest.mark.whole),
        ("back", "lossy"),
        ("first", "lossy"),
        ("spread-back", "spread-lossy"),
        ("tensor-still", "lossy"),
    ],
)
def test_checkpoints_move_between_stages_without_a_difference(name: str, origin: str, runs: RunsOfRanks) -> None:
    before, after = weights(runs[origin]), weights(runs[name])
    assert runs[name]["stopped"] == f"--stop-at {SAVED + 1}"
    assert before.keys() == after.keys() == weights(runs["alone"]).keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_what_a_run_says_of_its_pipeline(runs: RunsOfRanks) -> None:
    run = runs["lossy-on"]
    for said in ("layers by operations: 2, 2", "pipeline plan: fitted", "the pipeline from now on, simulated"):
        assert said in run["printed"]
    last = run["steps"][STEPS]
    assert 0 < last["pipeline_s"] <= last["step_s"] and 0 <= last["bubble"] < 1
    assert run["predicted_pipeline_s"] == last["predicted_pipeline_s"]
    events = json.loads((run["folder"] / "timeline.json").read_text())["traceEvents"]
    told = {name: sorted((each["pid"], each["name"]) for each in events if each["tid"] == name) for name in ROWS_DRAWN}
    # Forwards and backwards of 2 micro-batches on 2 stages.
    assert told["predicted"] == told["measured"] and len(told["measured"]) == 2 * 2 * 2
    assert all(each["dur"] > 0 for each in events)
    # The step that is predicted is the one that is drawn; a tied gradient may come behind the last action.
    predicted = [each for each in events if each["tid"] == "predicted"]
    end_s = max(each["ts"] + each["dur"] for each in predicted) / 1e6
    busy_s = sum(each["dur"] for each in predicted if each["pid"] == 0) / 1e6
    assert last["predicted_pipeline_s"] == pytest.approx(busy_s / (1 - last["predicted_bubble"]))
    assert end_s <= last["predicted_pipeline_s"] * (1 + 1e-9)
    assert "A step of the pipeline" in (run["folder"] / "report.html").read_text()
    # fp32 of whole models on 4 ranks.
    assert run["uncompressed_bytes_per_step"] == 6 * run["parameters"]


def test_a_spread_head_with_codecs_learns_and_sends_what_was_promised(runs: RunsOfRanks) -> None:
    spread, plain = runs["spread-lossy"], runs["lossy"]
    assert "all stages, some rows on each, like the embedding; barriers: 2" in spread["printed"]
    for step, found in spread["steps"].items():
        assert found["loss"] == pytest.approx(plain["steps"][step]["loss"], rel=1e-2)
    assert "tied weights" in plain["printed"] and "tied weights" not in spread["printed"]


def test_a_run_that_skips_stages_goes_on_along_the_same_paths(runs: RunsOfRanks) -> None:
    once, on, whole = runs["skip"], runs["skip-on"], runs["alone"]
    assert "3 of 4 stages for each micro-batch" in once["printed"]
    assert "paths of micro-batches: taken over for steps of 4 micro-batches, until links drift" in on["printed"]
    assert "a relative difference of 0\n" in on["printed"]
    assert on["steps"][STEPS]["loss"] < once["steps"][1]["loss"]
    assert on["steps"][STEPS]["loss"] != pytest.approx(whole["steps"][STEPS]["loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--stages", "3"), "--stages 3: must divide the 4 ranks; nearest: --stages 2"),
        (("--stages", "4", "--llama.num-hidden-layers", "3"), "the model has 3 layers, .* 2, or --llama"),
        # Beside a fault in the options, too.
        (("--stages", "4", "--llama.num-hidden-layers", "3", "--pipeline.skip", "0.25"), "the model has 3 layers"),
        (("--stages", "4", "--strategy", "fsdp", "--pipeline.skip", "0.25"), "fsdp can't train the stages"),
        (("--stages", "2", "--pipeline.layers", "3,2"), "must be 2 numbers .* that add up to the model's 4 layers"),
        (("--stages", "4", "--pipeline.plan", "dualpipe-v"), "4 stages, 2 chunk"),
        (
            ("--stages", "2", "--pipeline.plan", "dualpipe-v", "--tokens-per-step", "128"),
            "dualpipe-v needs at least as many as chunks of layers, 2 on each rank, so 4; nearest that works: 4",
        ),
        (("--stages", "2", "--pipeline.in-flight", "0"), "--pipeline.in-flight 0: must be at least 1; nearest: 1"),
        (
            ("--stages", "2", "--pipeline.backward", "int4/7"),
            "groups of 7 .* the 64 features of a token; nearest: .int4/4",
        ),
        # All at once, whatever is wrong beside it.
        (
            ("--stages", "4", "--llama.num-hidden-layers", "3", *NO_STEP),
            "(?s)--pipeline.in-flight 0: .*a multiple of seq_len.*groups of 7 .*the model has 3 layers",
        ),
        (
            ("--stages", "5", "--tensor", "3"),
            "(?s)--stages 5: must divide the 4 ranks; nearest: --stages 4\n.*heads 4: .*key_value_heads 2: must",
        ),
        (("--stages", "2", "--strategy", "fsdp"), "fsdp can't train the stages of a pipeline: it would gather"),
        (("--stages", "2", "--strategy", "one-byte"), "one-byte can't train the stages of a pipeline"),
        (("--stages", "2", "--strategy", "diloco", "--local-size", "1"), "islands of 1 ranks can't be cut so"),
        (("--stages", "2", "--strategy", "diloco", "--local-size", "2", "--inner", "fsdp"), "would gather a stage's"),
        (("--stages", "2", "--tensor", "4"), "--tensor 4: must divide the 2 ranks that --stages 2 leaves; nearest"),
        (("--tensor", "2", "--mesh", "pipeline=2,data=2"), "--tensor 2 and --mesh pipeline=2,data=2: give one"),
        (("--tensor", "4"), "a tensor axis of 4 ranks can't cut num_key_value_heads 2"),
        (
            ("--mesh", "pipeline=4,tensor=2", "--workers", "8", "--pipeline.recover", "average"),
            "beside a tensor axis of 2",
        ),
        (("--nodes", "4", "--node", "1", "--join", "h:1", "--workers", "1", "--tensor", "4"), "machines of 1"),
        (("--mesh", "pipeline=2,data=2", "--stages", "4"), "--stages 4 and --mesh pipeline=2,data=2: give one"),
        (("--stages", "2", "--pipeline.plan", "1f1b", "--pipeline.in-flight", "3"), "plan '1f1b' has its own"),
        (("--stages", "2", "--pipeline.plan", "gpipe", "--pipeline.head", "first"), "nearest: plan 'fitted'"),
        (("--stages", "2", "--pipeline.forward", "itn8"), "--pipeline.forward itn8: .*did you mean 'int8'"),
        (("--stages", "4", "--pipeline.skip", "0.25"), "skip 0.25: micro-batches come back .*head 'first'"),
        (("--stages", "4", "--pipeline.head", "first", "--pipeline.skip", "0.9"), "skip 0.9 of 4 .*nearest: 0.5"),
        (("--stages", "4", "--inject", "kill stage=4 step=2"), "stages are numbered from 0 to 3"),
        (("--stages", "4", "--pipeline.recover", "average", "--minutes", "1"), "recover: .* nearest: --steps"),
        (("--stages", "auto", "--mesh", "data=4"), "--stages auto finds the mesh"),
        (("--stages", "auto", "--tensor", "2"), "leave --mesh, --tensor and .*; or --tensor auto"),
        (("--stages", "2", "--tensor", "auto"), "--tensor auto is found beside the stages; nearest: --stages auto"),
        (("--strategy", "auto", "--mesh", "tensor=2"), "--mesh tensor=2: --strategy auto finds .* nearest: --tensor 2"),
        # All divisors of 6 ranks are not enough layers.
        (("--stages", "8", "--workers", "6"), "^--stages 8: must divide the 6 ranks; nearest: --stages 3$"),
        (
            ("--stages", "8", "--workers", "6", "--pipeline.plan", "zbv"),
            "^--stages 8: .* nearest: --stages 2$",
        ),
        (
            ("--stages", "8", "--llama.num-hidden-layers", "3"),
            "^--stages 8: must .* nearest: --stages 2$",
        ),
        (("--stages", "4", "--llama.num-hidden-layers", "3"), "divisor of 4 .*: 2, or --llama.num-hidden-layers 4$"),
        (("--mesh", "pipeline=8"), "^--mesh pipeline=8 has 8 ranks and the run has 4"),
        (("--stages", "auto", "--model", "moe-tiny"), "for presets such as demo, and not for moe-tiny"),
        (("--stages", "auto", "--strategy", "diloco"), "--stages auto: stages beside islands"),
        (("--stages", "auto", "--pipeline.recover", "average"), "--stages auto with recover: .* nearest: --stages 4"),
        (("--stages", "2", "--pipeline.head", "spread", "--pipeline.plan", "gpipe"), "no place for its passes"),
        (("--stages", "2", "--tensor", "2", "--pipeline.head", "spread"), "head 'spread' beside a tensor axis of 2"),
        (
            ("--stages", "2", "--strategy", "diloco", "--local-size", "2", "--pipeline.head", "spread"),
            "head 'spread' inside of islands",
        ),
        (("--stages", "2", "--loss", "cut", "--pipeline.head", "spread"), "--loss cut with head 'spread'"),
        (("--stages", "4", "--pipeline.delta", "true", "--steps", "2"), "no sequence returns in 2 steps"),
    ],
)
def test_stages_that_do_not_fit_are_refused_before_a_process_starts(
    tmp_path: Path, flags: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused(tmp_path, ["--workers", "4", *SMALL, *flags], message, monkeypatch)
