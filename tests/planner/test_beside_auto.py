"""What becomes of each option beside `--strategy auto`: kept in the plan, refused, or announced as chosen anew."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.planner.machines import FAST, near
from thinwire.calibration.process import USUAL
from thinwire.compare.verify import run_plan
from thinwire.errors import ConfigError, Problems
from thinwire.launch.line import read_config
from thinwire.launch.prepare import by_batch, plan as checked, resolve
from thinwire.models import Llama, build_skeleton
from thinwire.planner import selection as module
from thinwire.planner.candidates import Candidate
from thinwire.planner.chosen_plan import changes, planned
from thinwire.planner.settings import name_of
from thinwire.planner.training_plan import TrainingPlan
from thinwire.run.config import TrainConfig
from thinwire.run.run import Run
from thinwire.run.settings import read_toml

STORE = "/var/tmp/thinwire-beside-auto"
MADE = replace(near(FAST), disk=(1e8, 1e9), base_bytes=400e6)
# What a plan may set; every other option stays as it is typed.
PLANNED = {
    "strategy", "stages", "tensor", "order", "micro_batch", "tokens_per_step", "seq_len", "tables", "memory", "store",
    "activations", "slices",
}  # fmt: skip
SHARDED = ("zero", "zero-bf16", "sdp4bit")
# Options that a plan keeps: what each of its ways then has, and what of the configuration stays as typed.
FIXED: dict[str, tuple[Callable[[Candidate], bool], dict[str, Any]]] = {
    "--stages 2 --pipeline.plan 1f1b": (lambda way: way.stages == 2 and way.pipeline.plan == "1f1b", {"stages": 2}),
    "--tensor 2": (lambda way: way.tensor == 2, {"tensor": 2}),
    "--tensor 1": (lambda way: way.tensor == 1, {}),
    "--sequence.parallel 2": (lambda way: way.sequence == 2, {}),
    "--sequence.parallel 1": (lambda way: way.sequence == 1, {}),
    "--micro-batch 1 --tokens-per-step 512 --seq-len 64": (
        lambda way: way.micro_batch == 1,
        {"micro_batch": 1, "tokens_per_step": 512, "seq_len": 64},
    ),
    "--activations recompute": (lambda way: ("activations", "recompute") in way.held, {"activations": "recompute"}),
    "--activations recompute:disk": (lambda way: way.stages == 1, {"activations": "recompute:disk"}),
    "--activations keep": (lambda way: way.pipeline.recompute == "never" and not way.held, {"activations": "keep"}),
    "--slices 2": (lambda way: way.micro_batch >= 2 and name_of(way.strategy) in SHARDED, {"slices": 2}),
    f"--store {STORE}": (lambda way: ("store", STORE) in way.held, {"store": STORE, "memory": None}),
    "--store none": (lambda way: not way.is_resident, {"store": "none"}),
    "--memory 8gb": (lambda way: not way.is_resident, {"memory": "8gb", "store": "none"}),
    f"--memory 8gb --store {STORE}": (lambda way: not way.is_resident, {"memory": "8gb", "store": "none"}),
    "--memory 8gb --residency.weights disk": (lambda way: way.is_resident, {"memory": "8gb"}),
    "--optimizer lans": (lambda way: name_of(way.strategy) in ("ddp", "ddp-bf16"), {"optimizer": "lans"}),
    "--optimizer mfac": (lambda way: way.stages * way.tensor == 1, {"optimizer": "mfac"}),
    "--optimizer muon --memory 8gb": (lambda way: not way.is_resident, {"optimizer": "muon", "memory": "8gb"}),
    "--loss cut": (lambda way: True, {"loss": "cut"}),
    "--documents": (lambda way: way.stages == 1, {"documents": True}),
}  # fmt: skip
REFUSED = {
    "--mesh data=2,tensor=2": "--mesh data=2,tensor=2: --strategy auto finds the mesh, and keeps single axes; nearest: "
    "--tensor 2",
    "--mesh data=4": "keeps single axes; nearest: leave --mesh out",
    "--order 0 1 2 3": "--order 0 1 2 3: --strategy auto finds the order of ranks; nearest: leave --order out",
    "--plan plan.json": "--strategy auto makes a plan of its own",
    "--inner zero": "chooses no islands; nearest: --strategy diloco --inner zero",
    "--compile": "may cut the model into stages, which are not compiled",
    "--teacher hf:there": "nearest: --strategy zero, or leave --teacher out",
    "--pipeline.recover average": "a restarted process can't choose",
    "--pipeline.across replicas": "finds an order in which stages cross nodes",
    "--optimizer onebit-adam": "from which --strategy auto chooses; nearest: --optimizer adamw, or --strategy onebit",
    "--optimizer adamx": "no such optimizer",
    "--memory 2gigs": "did you mean",
    "--store none --activations offload": "needs one: --activations offload; nearest: a folder, or leave --store out",
    "--store /dev/shm/x": "lies on tmpfs, which is memory and not a disk",
    "--activations keep --slices 2": "--slices 2: with activations keep a layer keeps those of all slices; nearest: "
    "--activations recompute",
    "--slices 2 --documents": "--slices with --documents",
    "--documents --stages 2": "they pass tokens and targets on",
    "--stages 3": "must divide the 4 ranks",
    "--inject 'kill stage=1 step=2'": "the ranks choose the stages later",
}


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """One candidate is simulated, and a worker takes the same before it has a model on every machine."""
    monkeypatch.setattr(module, "NUM_SIMULATED", 1)
    monkeypatch.setattr(module, "first_of_kinds", lambda by_speed, choice: set())
    for room in ("run.residency", "planner.chosen_plan"):
        monkeypatch.setattr(f"thinwire.{room}.process_memory", lambda: USUAL)


def asked_for(words: str, folder: Path) -> Run:
    """The run of a command line, checked as before a process starts."""
    problems = Problems()
    place = [
        "--run-dir",
        str(folder / "run"),
        "--model",
        "tiny",
        "--workers",
        "4",
        "--local-size",
        "2",
        "--dtype",
        "fp32",
    ]
    run, _ = checked(read_config(["--strategy", "auto", *place, *shlex.split(words)], problems), problems)
    return run


def chosen(words: str, folder: Path) -> tuple[TrainingPlan, Run]:
    """The plan of a command line, and the run that follows it."""
    run = asked_for(words, folder)
    model = build_skeleton("tiny", 257, run.config.seq_len)
    assert isinstance(model, Llama)
    found = planned(run.config, model, MADE, "fp32", run.memory_bytes or float("inf"))
    made = changes(run.config, found)
    assert made.keys() <= PLANNED
    return found, Run.of(replace(run.config, **made))


@pytest.mark.parametrize("words", FIXED)
def test_a_plan_keeps_what_is_typed(words: str, tmp_path: Path) -> None:
    holds, kept = FIXED[words]
    found, run = chosen(words, tmp_path)
    assert found.search.fastest and all(holds(priced.candidate) for priced in found.search.fastest)
    assert {name: getattr(run.config, name) for name in kept} == kept
    # Only what lies elsewhere, or is computed again, has a residency.
    assert (run.residency is not None) == found.best.candidate.is_resident
    rows = [*found.rows("--strategy auto"), *found.memory_rows({"store": STORE} if STORE in words else {})]
    said = "\n".join(" ".join(row) for row in rows)
    for option, what in (
        ("--optimizer lans", "without zero, zero-bf16, sdp4bit such a strategy cuts tensors anywhere"),
        ("--activations recompute ", "--activations recompute without "),
        ("--slices 2", "micro-batches of fewer than 2 sequences"),
        (f"--memory 8gb --store {STORE}", f"--store {STORE} no effect"),
        ("--memory 8gb", "--memory 8gb"),
    ):
        assert option not in f"{words} " or what in said


@pytest.mark.parametrize("words", REFUSED)
def test_what_can_not_be_kept_is_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        asked_for(words, tmp_path)
    assert REFUSED[words] in str(error.value)


def test_every_option_is_kept_refused_or_chosen() -> None:
    """An option that is new to `thinwire train` needs a row here."""
    told = " ".join((*FIXED, *REFUSED)).replace("-", "_")
    names = {item.name for item in fields(TrainConfig)}
    assert {name for name in PLANNED if f"__{name}" not in told} == {"strategy", "tables"} and names >= PLANNED


def test_a_budget_that_nothing_fits_names_the_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much suffices, and 1% less does not. Each search prices what the first one has not."""
    # Few sizes of micro-batches.
    kept = "--micro-batch 1 --tokens-per-step 1024"
    for more in ("", " --activations recompute", f" --residency.optimizer disk --store {STORE}", " --store none"):
        with pytest.raises(ConfigError) as error:
            chosen(f"--memory 100mb {kept}{more}", tmp_path)
        found = re.search(r"no way to train fits; the least is (\d+) MB; nearest: (\d+)mb$", str(error.value))
        assert found is not None and found[1] == found[2]
        assert chosen(f"--memory {found[1]}mb {kept}{more}", tmp_path)[0].search.fastest
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match="no way to train fits"):
            # Which is the least, nobody asks.
            patch.setattr("thinwire.planner.plan.least_bytes", lambda fits, guess, refused: guess)
            chosen(f"--memory {int(0.99 * int(found[1]))}mb {kept}{more}", tmp_path)


def test_what_a_micro_batch_decides_is_told_of_the_plans(tmp_path: Path) -> None:
    run = asked_for("--stages 2", tmp_path)
    resolved, rows = resolve(run, run.config, 1)
    # Of the default size nothing is said, and nothing kept.
    assert resolved.config.loss == "auto" and not [row for row in rows if row[0].startswith("--loss")]
    _, made = chosen("--stages 2", tmp_path)
    loss, ((asked, effect, why),) = by_batch(made.config)
    assert (asked, effect) == ("--loss auto", loss) and made.config.micro_batch < run.config.micro_batch
    assert f"{made.config.micro_batch * made.config.seq_len} x 256, " in why


def test_the_optimizer_is_not_said_to_be_the_choice_of_auto(tmp_path: Path) -> None:
    run = asked_for("", tmp_path)
    _, rows = resolve(run, replace(run.config, optimizer=None), 1)
    assert ("--optimizer", "adamw", "the choice of the strategies from which --strategy auto chooses") in rows


def test_a_plan_that_is_written_trains_as_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "machine.json", tmp_path / "plan.toml"
    file.write_text(MADE.to_json())
    base = ["--machine", str(file), "--out", str(out), "--model", "tiny", "--tokens-per-step", "2048"]

    def trained(words: str) -> Run:
        assert run_plan([*base, *shlex.split(words)]) == 0
        problems = Problems()
        config = read_config([str(out), "--plan", "", "--run-dir", str(tmp_path / "run")], problems)
        run, _ = checked(replace(config, nodes=1, workers=4), problems)
        return run

    run = trained("--memory 8gb --optimizer muon --loss cut")
    assert run.config.memory == "8gb" and run.memory_bytes == 8 * 10**9 and run.residency is None
    assert run.config.optimizer == "muon" and read_toml(out, Problems()).loss == "cut"
    assert "--memory 8gb: all lies in memory" in capsys.readouterr().out
    run = trained(f"--memory 8gb --activations recompute --store {STORE}")
    assert run.residency is not None and run.residency.activations == "recompute" and run.config.store == STORE
    assert "without ddp, ddp-bf16" in capsys.readouterr().out
    with pytest.raises(ConfigError) as error:
        run_plan([*base, "--activations", "recomputed", "--optimizer", "adamx", "--memory", "8"])
    assert all(text in str(error.value) for text in ("no such optimizer", "'8gb'"))
