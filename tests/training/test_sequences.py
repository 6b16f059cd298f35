"""`--sequence.parallel` on the command line: as one process, and checkpoints move to any number of sequence ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.commands import check_refused, train_ranks
from thinwire.planner.command import run_explain

STEPS, SAVED = 6, 3
# Five held-out sequences: the replicas have unequal numbers of batches.
SMALL = (
    "--model", "tiny", "--seq-len", "22", "--micro-batch", "2", "--tokens-per-step", "176", "--lr", "0.003",
    "--llama.num-hidden-layers", "2", "--dtype", "fp32", "--eval-sequences", "5", "--sample-tokens", "8",
    "--timeout", "120", "--local-size", "1", "--steps", str(STEPS),
)  # fmt: skip
LOSSY = (
    "--strategy sdp4bit --sequence.parallel 2 --sequence.method ulysses --sequence.wire int8/64:nearest "
    "--sequence.gradients int8/64"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sequences")
    stop = f"--stop-at {SAVED}"
    rows: list[tuple[str, int, str, str]] = [
        ("alone", 1, "--strategy zero", ""),
        ("four", 4, f"--strategy zero --sequence.parallel 2 {stop}", ""),
        ("ring", 2, "--strategy zero --sequence.parallel 2 --sequence.method ring", "four"),
        ("one", 1, "--strategy zero --sequence.parallel 1", "four"),
        ("lossy", 2, LOSSY, ""),
        ("lossy-part", 2, f"{LOSSY} {stop}", ""),
        ("lossy-on", 2, LOSSY, "lossy-part"),
    ]
    found: dict[str, dict[str, Any]] = {}
    for name, num_ranks, flags, origin in rows:
        run = train_ranks(folder, name, num_ranks, [*SMALL, *flags.split()], origin)
        found[name] = run | {"losses": [line["loss"] for line in run["steps"].values()]}
    return found


def test_sequences_train_as_one_process_and_move_to_others(runs: dict[str, dict[str, Any]]) -> None:
    alone = runs["alone"]
    for name in ("ring", "one"):
        run = runs[name]
        assert run["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert run["heldout_loss"] == pytest.approx(alone["heldout_loss"], rel=1e-5)
        assert "resume proven" in run["printed"] and "within 1e-05" in run["printed"]
    chosen = r"--sequence.method auto: (ulysses|ring) \(of a layer and micro-batch, seconds .*: .*MB"
    assert re.search(chosen, runs["four"]["printed"]) and "measured for it: inter " in runs["four"]["printed"]
    assert "measured for it" not in runs["ring"]["printed"] and "sequence method ring" in runs["ring"]["printed"]
    assert "no effect" not in runs["one"]["printed"].split("network interface")[0]


def test_a_run_and_explain_state_the_same_bytes_of_a_step(
    runs: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    # Of sequences of 22 tokens that are padded to 24, four micro-batches of two.
    flags = (
        "--model tiny --llama.num-hidden-layers 2 --nodes 2 --local-size 1 --seq-len 22 --micro-batch 2 --dtype fp32"
    )
    more = "--micro-batches 4 --strategy zero --sequence.parallel 2 --sequence.method ring"
    assert run_explain([*flags.split(), *more.split()]) == 0
    (told,) = re.findall(r"sequence of 2 ranks: ([\d.]+) MB sent a rank and step", capsys.readouterr().out)
    (of_run,) = re.findall(r"send each other, a step: ([\d.]+) MB a rank", runs["ring"]["printed"])
    assert told == of_run and float(told) > 0


def test_rounded_sequences_resume_bit_for_bit(runs: dict[str, dict[str, Any]]) -> None:
    whole, resumed = runs["lossy"], runs["lossy-on"]
    assert whole["losses"] == resumed["losses"] and whole["heldout_loss"] == resumed["heldout_loss"]
    exact = runs["alone"]["losses"]
    assert whole["losses"] == pytest.approx(exact, rel=0.05) and whole["losses"] != pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--workers 8 --sequence.parallel 8 --sequence.method ulysses", "4 heads on 8 ranks"),
        ("--workers 8 --sequence.parallel 8 --sequence.method ulysses", "method 'ring' or 'ulysses=4,ring=2'"),
        ("--workers 4 --sequence.parallel 3", "must divide the 4 ranks; nearest: --sequence.parallel 2"),
        ("--workers 4 --sequence.parallel 2 --stages 2", "can't have both; nearest: --stages 1, or --sequence"),
        ("--workers 4 --mesh data=2,sequence=2 --sequence.parallel 4", "give one of them"),
        ("--workers 4 --mesh data=1,sequence=2,tensor=2", "sequence beside tensor: not supported; nearest: sequence"),
        (
            "--workers 2 --sequence.parallel 2 --sequence.wire int4/64:stochastic",
            "not at random; nearest: 'int4/64:nearest'",
        ),
        ("--workers 4 --sequence.parallel 4 --sequence.method ulysses=3", "has 3 ranks and the sequence 4; nearest"),
        ("--workers 2 --sequence.parallel 2 --strategy diloco", "sequence beside island: not supported"),
    ],
)
def test_what_can_not_work_is_told_before_anything_starts(
    flags: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = "" if "--strategy" in flags else "--strategy zero"
    check_refused(tmp_path, f"--model tiny --seq-len 16 {strategy} {flags}".split(), re.escape(words), monkeypatch)


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({"attention_dropout": 0.1}, 2, "attention_dropout 0.1: parts of a sequence can't share a mask; nearest: 0.0"),
        ({}, 8, "4 heads on 8 ranks: each needs a head; nearest that works: method 'ring' or 'ulysses=4,ring=2'"),
    ],
)
def test_so_is_what_a_model_of_transformers_can_not_do(
    changes: dict[str, Any], ranks: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    folder = tmp_path / "model"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **changes)).save_pretrained(folder)
    flags = f"--model hf:{folder} --seq-len 16 --strategy zero --workers {ranks} --sequence.parallel {ranks}"
    check_refused(tmp_path, [*flags.split(), "--sequence.method", "ulysses"], re.escape(words), monkeypatch)
