"""What the documentation says is true: commands parse or run, code runs, links lead somewhere, tables are complete."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, Block, anchors, blocks, links, table_rows
from tests.workers import HANG_S, Command, run_program
from thinwire.codecs import Codec
from thinwire.codecs.table import all_rows
from thinwire.compare import RaceConfig
from thinwire.compare.checks import read_race
from thinwire.compare.contestants import read_contestants
from thinwire.compare.plan import shared_config
from thinwire.completion import SHELLS
from thinwire.convert import ExportConfig, GenerateConfig, ImportConfig
from thinwire.convert.options import read as read_conversion
from thinwire.errors import Problems
from thinwire.expansion.options import ExpandConfig, read as read_expand
from thinwire.flags import flag, options_of
from thinwire.lab import LabSpec
from thinwire.lab.command import LabOptions, read as read_lab
from thinwire.launch.calibrate import CalibrateConfig, calibrate_line, check as check_calibration
from thinwire.launch.line import read_config
from thinwire.methods.data.dgc import DGC
from thinwire.methods.data.frontier import Frontier
from thinwire.methods.data.onebit_adam import OneBitAdam
from thinwire.methods.data.sdp4bit import SDP4Bit
from thinwire.methods.data.zeropp import ZeroPP
from thinwire.methods.experts import ExpertParallel
from thinwire.methods.memory import Residency
from thinwire.methods.pipeline import Pipeline
from thinwire.methods.sequence import SequenceParallel
from thinwire.planner.explain import explain
from thinwire.planner.options import ExplainConfig, read_explain
from thinwire.planner.plan_line import read_plan_line, read_tune_line
from thinwire.planner.plan_options import PlanConfig, TuneConfig, read_bytes
from thinwire.pruning.options import PruneConfig, read as read_prune
from thinwire.registry import STRATEGIES, class_of
from thinwire.report.metrics import MembershipEvent, StepMetrics, WayEvent
from thinwire.run.config import TrainConfig

CONVERSIONS: dict[str, Any] = {"export": ExportConfig, "import": ImportConfig, "generate": GenerateConfig}
MADE_ANEW: dict[str, Any] = {"expand": ExpandConfig, "prune": PruneConfig}
READERS: dict[str, Callable[[list[str]], object]] = {"expand": read_expand, "prune": read_prune}
PLANNERS: dict[str, Callable[[list[str], Problems], PlanConfig]] = {"plan": read_plan_line, "tune": read_tune_line}
CLI_PAGE = ROOT / "docs/reference/cli.md"
# The page has what is not as in the other command.
TUNING = ("tune", TuneConfig, fields(PlanConfig))
RUN_DIR_PAGE = ROOT / "docs/reference/run-directory.md"
README_LOOPS = [block for block in blocks("python") if block.page.name == "README.md"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_thinwire(words: list[str], folder: Path) -> None:
    """A command of thinwire, forked from a process that has loaded what it needs."""
    command = Command(words, folder, ENVIRONMENT)
    out, err = command.communicate(HANG_S)
    command.close()
    assert command.returncode == 0, f"{words} ended with {command.returncode}\n{out}\n{err}"


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_commands_are_understood(block: Block) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for words in block.commands():
        if words[0] == "make":
            assert words[1] in targets
        elif words[:2] == ["thinwire", "compare"]:
            understand_compare(words[2:])
        elif words[:2] == ["thinwire", "explain"]:
            understand_explain(words[2:])
        elif words[:2] == ["thinwire", "calibrate"]:
            understand_calibration(words[2:])
        elif words[0] == "thinwire" and words[1] in PLANNERS:
            understand_plan(words[1], words[2:])
        elif words[:2] == ["thinwire", "lab"]:
            understand_lab(words[2:])
        elif words[0] == "thinwire" and words[1] in CONVERSIONS:
            understand_conversion(words[1], words[2:])
        elif words[0] == "thinwire" and words[1] in READERS:
            assert words[2:] == ["--help"] or READERS[words[1]](words[2:])
        elif words[:2] == ["thinwire", "codecs"]:
            assert all(map(Codec.parse, words[2:]))
        elif words[:2] == ["thinwire", "completion"]:
            assert words[2] in SHELLS and words[3:4] == [">"]
        elif words[:2] == ["thinwire", "report"]:
            assert len(words) == 3
        elif words[:2] == ["thinwire", "checkpoints"]:
            assert words[3:] in ([], ["--verify"])
        elif "train" in words:
            understand_train(words[words.index("train") + 1 :])
        else:
            # A program of the reader's own is called train.py; any other lies here.
            is_program = words[0] in ("torchrun", "python") and (
                words[-1] == "train.py" or any((ROOT / words[i]).is_file() for i in (1, -1))
            )
            known = is_program or words in (["thinwire", "--version"], [".", ".venv/bin/activate"])
            assert known, f"unknown command {words}"


def understand_train(args: list[str]) -> None:
    if args in (["--help"], ["--help-all"], ["CONFIG.toml", "--steps", "500"]):
        return
    problems = Problems()
    # What the reader has written by another command.
    config = read_config([arg for arg in args if arg != "plan.toml"], problems)
    assert not problems.messages
    assert config.strategy in (*STRATEGIES, "auto")


def understand_calibration(args: list[str]) -> None:
    if args == ["--help"]:
        return
    problems = Problems()
    check_calibration(CalibrateConfig(**calibrate_line().read(args, problems)[""]), problems)
    assert not problems.messages


def understand_plan(command: str, args: list[str]) -> None:
    if args == ["--help"]:
        return
    problems = Problems()
    config = PLANNERS[command](args, problems)
    assert config.memory is None or read_bytes(config.memory)
    assert not problems.messages


def understand_conversion(command: str, args: list[str]) -> None:
    if args != ["--help"]:
        read_conversion(CONVERSIONS[command], args)


def understand_compare(args: list[str]) -> None:
    if args == ["--help"]:
        return
    problems = Problems()
    race, train = read_race([arg for arg in args if arg != "CONFIG.toml"], problems)
    read_contestants(race.strategies, problems, shared_config(train, LabSpec.from_text(race.lab)))
    assert not problems.messages


def understand_explain(args: list[str]) -> None:
    if args == ["--help"]:
        return
    problems = Problems()
    assert explain(read_explain(args, problems), problems).plans


def understand_lab(args: list[str]) -> None:
    if args == ["--help"]:
        return
    split = args.index("--") if "--" in args else len(args)
    command = args[split + 1 :]
    assert bool(command) != ("--check" in args)
    read_lab([*(arg for arg in args[:split] if arg != "--check"), "--check"])
    if "train" in command:
        understand_train(command[command.index("train") + 1 :])


def test_a_wrong_flag_would_be_noticed() -> None:
    with pytest.raises((AssertionError, SystemExit)):
        understand_train(["--wrokers", "2"])


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands that ask for it have been run."""
    folder = tmp_path_factory.mktemp("docs")
    for block in blocks("sh"):
        for words in block.commands() if block.is_run else []:
            assert words[0] == "thinwire"
            run_thinwire(words[1:], folder)
    return folder


def test_files_of_a_run_are_documented(run_folder: Path) -> None:
    documented = {row[0].rstrip("/") for row in table_rows(RUN_DIR_PAGE, "Files")}
    written = {path.name for path in (run_folder / "runs/first").iterdir()}
    # The store is of runs with --memory, its list of durable ones, the timeline of those with stages.
    assert written == documented - {"store", "durable-stores.txt", "timeline.json"}
    run_thinwire(["checkpoints", "runs/first", "--verify"], run_folder)


def test_keys_of_a_run_are_documented(run_folder: Path) -> None:
    run_dir = run_folder / "runs/first"
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    assert list(steps[0]) == [row[0] for row in table_rows(RUN_DIR_PAGE, "metrics.jsonl")]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert sorted(summary) == sorted(row[0] for row in table_rows(RUN_DIR_PAGE, "summary.json"))


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_code_runs_and_prints_what_it_says(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(block.text)
    if not re.search("init_process_group|init_device_mesh", block.text):
        printed, _ = run_program(script, 1)
    else:
        # As torchrun starts it, which tests/training/test_runs.py runs itself: new interpreters take seconds longer.
        printed, _ = run_program(script, block.num_ranks)
    promised = re.findall(r"^# -> (.*)$", block.text, flags=re.MULTILINE)
    assert promised == printed.splitlines() or not promised


def test_readme_loops_are_short() -> None:
    assert [block.num_ranks for block in README_LOOPS] == [2, 4]
    assert all(len([line for line in loop.text.splitlines() if line.strip()]) <= 13 for loop in README_LOOPS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_every_flag_is_documented_with_its_default() -> None:
    documented = {row[0]: row[1].strip("`") for row in table_rows(CLI_PAGE, "Flags of `thinwire train`")}
    assert documented == {flag(item.name): shown(item.default) for item in fields(TrainConfig) if item.name != "tables"}


def test_every_flag_of_a_race_is_documented_with_its_default() -> None:
    documented = {row[0]: row[1].strip("`") for row in table_rows(CLI_PAGE, "Flags of `thinwire compare`")}
    assert documented == {flag(item.name): shown(item.default) for item in fields(RaceConfig)}


def test_every_flag_of_an_explanation_is_documented_with_its_default() -> None:
    documented = {row[0]: row[1].strip("`") for row in table_rows(CLI_PAGE, "Flags of `thinwire explain`")}
    own = [item for item in fields(ExplainConfig) if item.name != "tables"]
    assert documented == {flag(item.name): shown(item.default) for item in own}


def test_every_flag_of_the_lab_is_documented_with_its_default() -> None:
    documented = {row[0]: row[1].strip("`") for row in table_rows(CLI_PAGE, "Flags of `thinwire lab`")}
    assert documented == {flag(item.name): shown(item.default) for item in fields(LabOptions)}


def test_every_flag_of_planning_is_documented_with_its_default() -> None:
    for name, config, beside in (("calibrate", CalibrateConfig, ()), ("plan", PlanConfig, ()), TUNING):
        documented = {row[0]: row[1].strip("`") for row in table_rows(CLI_PAGE, f"Flags of `thinwire {name}`")}
        known = {(item.name, item.default) for item in beside}
        own = [item for item in fields(config) if item.name != "tables" and (item.name, item.default) not in known]
        assert documented == {flag(item.name): shown(item.default) for item in own}


@pytest.mark.parametrize("command", CONVERSIONS | MADE_ANEW)
def test_every_flag_of_a_conversion_is_documented_with_its_default(command: str) -> None:
    documented = {row[0]: row[1].strip("`") for row in table_rows(CLI_PAGE, f"Flags of `thinwire {command}`")}
    named = [item for item in fields((CONVERSIONS | MADE_ANEW)[command]) if item.default is not MISSING]
    assert documented == {flag(item.name): shown(item.default) for item in named}


def shown(default: object) -> str:
    if default is None or default == ():
        return ""
    if isinstance(default, tuple):
        return " ".join(default)
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default).strip()


def test_every_metric_is_documented() -> None:
    documented = [row[0] for row in table_rows(RUN_DIR_PAGE, "metrics.jsonl")]
    assert documented == [item.name for item in fields(StepMetrics)]


def test_every_key_of_a_change_is_documented() -> None:
    documented = [row[0] for row in table_rows(RUN_DIR_PAGE, "Changes of membership")]
    assert documented == [item.name for item in fields(MembershipEvent)]
    documented = [row[0] for row in table_rows(RUN_DIR_PAGE, "Ways of rows to experts")]
    assert documented == [item.name for item in fields(WayEvent)]


@pytest.mark.parametrize("strategy", [SDP4Bit, Frontier, ZeroPP, DGC, OneBitAdam])
def test_every_option_is_documented(strategy: Any) -> None:
    rows = table_rows(ROOT / f"docs/methods/{strategy().name}.md", "Options")
    documented = [name for row in rows for name in re.findall(r"\w+", row[0])]
    assert sorted(documented) == sorted(item.name for item in fields(strategy))


def test_every_option_of_a_pipeline_is_documented() -> None:
    documented = [row[0] for row in table_rows(ROOT / "docs/tasks/cut-the-model.md", "In the trainer")]
    assert documented == [item.name for item in fields(Pipeline)]


def test_every_option_of_sequences_is_documented() -> None:
    documented = [row[0] for row in table_rows(ROOT / "docs/tasks/long-sequences.md", "In the trainer")]
    assert documented == [item.name for item in fields(SequenceParallel)]


def test_every_option_of_experts_is_documented() -> None:
    documented = [row[0] for row in table_rows(ROOT / "docs/tasks/spread-experts.md", "In the trainer")]
    assert documented == [item.name for item in fields(ExpertParallel)]


def test_every_option_of_a_residency_is_documented() -> None:
    documented = [row[0] for row in table_rows(ROOT / "docs/tasks/larger-than-memory.md", "In the trainer")]
    assert documented == [item.name for item in fields(Residency)]


def test_every_option_of_islands_is_documented() -> None:
    rows = table_rows(ROOT / "docs/methods/diloco.md", "Options")
    documented = {name: row[1].replace("`", "").split(", ") for row in rows for name in re.findall(r"\w+", row[0])}
    for name in ("diloco", "streaming-diloco", "local-sgd"):
        own = {item.name for item in options_of(class_of(name))}
        assert own == {option for option, of in documented.items() if name in of or of == ["all"]}


def test_every_codec_is_documented() -> None:
    documented = [tuple(row) for row in table_rows(ROOT / "docs/methods/codecs.md", "How a codec is written")]
    marked = [(*row[:3], " ".join(f"`:{option}`" for option in row[3].split())) for row in all_rows()]
    assert documented == [tuple(cell.strip("`") for cell in row) for row in marked]


def test_every_strategy_is_documented() -> None:
    pages = [ROOT / "docs/index.md", *(ROOT / "docs/methods").glob("*.md")]
    documented = [row[0] for page in pages for row in table_rows(page, "Which strategy")]
    assert sorted(documented) == sorted(STRATEGIES)


def test_readme_has_room_for_the_results() -> None:
    text = (ROOT / "README.md").read_text()
    assert 0 < text.index("<!-- results:begin -->") < text.index("<!-- results:end -->")


def test_figures_on_the_first_screen_are_measured() -> None:
    page = ROOT / "README.md"
    shown_first = [figure for _, answer in table_rows(page, "Why") for figure in re.findall(r"\d+\.\d+|\d{3}", answer)]
    measured = re.findall(r"\d+\.\d+|\d{3}", str([row[:2] for row in table_rows(page, "Measured")]))
    assert shown_first and set(shown_first) <= set(measured)


def test_the_site_builds(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)], ROOT)
    assert (tmp_path / "index.html").is_file()
