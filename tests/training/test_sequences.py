"""`--sequence.parallel` on the command line: as one process, and checkpoints move to any number of sequence ranks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.workers import run_command
from thinwire import cli
from thinwire.errors import ConfigError

STEPS, SAVED = 6, 3
# Five held-out sequences: the replicas have unequal numbers of batches.
SMALL = (
    "--model", "tiny", "--seq-len", "22", "--micro-batch", "2", "--tokens-per-step", "176", "--lr", "0.003",
    "--llama.num-hidden-layers", "2", "--dtype", "fp32", "--eval-sequences", "5", "--sample-tokens", "8",
    "--timeout", "120", "--local-size", "1",
)  # fmt: skip
LOSSY = "--strategy sdp4bit --sequence.parallel 2 --sequence.wire int8/64:nearest --sequence.gradients int8/64"


def train(folder: Path, name: str, num_ranks: int, flags: str, origin: str = "") -> dict[str, Any]:
    """A run: its steps, summary, and what it printed. origin: whose checkpoint it resumes."""
    run_dir, text, log = folder / name, folder / "text.txt", folder / f"{name}.log"
    text.write_text("".join(f"def f{n}(x):\n    return x * {n} + {n % 7}\n" for n in range(300)))
    if origin:
        shutil.copytree(folder / origin, run_dir)
        flags += " --resume"
    place = ("--data", str(text), "--cache-dir", str(folder / "cache"), "--run-dir", str(run_dir))
    run_command(["train", *SMALL, *place, "--steps", str(STEPS), *flags.split()], num_ranks, log)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    return summary | {"losses": [line["loss"] for line in lines], "printed": log.read_text()}


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
    return {name: train(folder, name, ranks, flags, origin) for name, ranks, flags, origin in rows}


def test_sequences_train_as_one_process_and_move_to_others(runs: dict[str, dict[str, Any]]) -> None:
    alone = runs["alone"]
    for name in ("ring", "one"):
        run = runs[name]
        assert run["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert run["heldout_loss"] == pytest.approx(alone["heldout_loss"], rel=1e-5)
        assert "resume proven" in run["printed"] and "within 1e-05" in run["printed"]
    assert "ulysses" in runs["four"]["printed"] and "sequence method ring" in runs["ring"]["printed"]
    assert "no effect" not in runs["one"]["printed"].split("network interface")[0]


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
        ("--workers 4 --sequence.parallel 3", "must divide the 4 ranks, without --stages; nearest: 2"),
        ("--workers 4 --mesh data=2,sequence=2 --sequence.parallel 4", "give one of them"),
        ("--workers 4 --mesh data=1,sequence=2,tensor=2", "not served; nearest: data alone"),
        ("--workers 2 --sequence.parallel 2 --sequence.wire int4/64", "nearest: 'int4/64:nearest', or 'exact'"),
        ("--workers 4 --sequence.parallel 4 --sequence.method ulysses=3", "has 3 ranks and the sequence 4; nearest"),
        ("--workers 2 --sequence.parallel 2 --strategy diloco", "nearest: data alone"),
    ],
)
def test_what_can_not_work_is_told_before_anything_starts(
    flags: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr("thinwire.launch.agent.make_agent", refuse)
    strategy = "" if "--strategy" in flags else "--strategy zero"
    place = f"--model tiny --data {__file__} --run-dir {tmp_path / 'run'} --seq-len 16 {strategy}"
    with pytest.raises(ConfigError, match=re.escape(words)):
        cli.run(["train", *place.split(), *flags.split()])
    assert not (tmp_path / "run").exists()
