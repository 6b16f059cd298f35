"""The front door: help, versions, and every kind of bad input."""

from __future__ import annotations

import socket
import subprocess
import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

import thinwire
from tests.checkpoint.alone import save
from thinwire import SDP4Bit, cli
from thinwire.errors import ConfigError, Problems
from thinwire.flags import CommandLine
from thinwire.lab.command import LabOptions
from thinwire.launch.line import GROUPS, command_line
from thinwire.run.config import TrainConfig
from thinwire.run.run_dir import RunDir


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("some words to learn\n" * 200)
    return path


def train(tmp_path: Path, data: Path | str, *flags: str) -> None:
    """`thinwire train`, which these flags keep from starting any process."""
    small = ["--model", "tiny", "--seq-len", "16", "--micro-batch", "2", "--steps", "1", "--dtype", "fp32"]
    places = ["--data", str(data), "--cache-dir", str(tmp_path / "cache"), "--run-dir", str(tmp_path / "run")]
    cli.run(["train", *small, *places, *flags])


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr("thinwire.launch.agent.make_agent", refuse)
    # The test's own process keeps its signal handlers.
    monkeypatch.setattr("thinwire.launch.agent.Relay.listen", lambda self: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stepps", "3"], "unknown flag --stepps; did you mean '--steps'"),
        (["--density", "0.1"], "unknown flag --density; did you mean .*--demo.density"),
        (["--nproc-per-node", "2"], "unknown flag --nproc-per-node; did you mean '--workers'"),
        (["--strategy", "sdp4"], "no such strategy; did you mean 'sdp4bit'"),
        (
            ["--strategy", "demo[beta=0.9]"],
            "brackets are for races.*nearest: --strategy demo, and each",
        ),
        (["--model", "tinny"], "no such preset.*did you mean 'tiny'"),
        (["--llama.hidden-size", "63"], "hidden_size=63: must be a multiple"),
        (["--tokens-per-step", "50", "--workers", "2"], "must be a multiple of .* = 32; nearest: 64"),
        (["--workers", "3", "--local-size", "2"], "local size 2 does not fit a world of 3"),
        (["--strategy", "frontier", "--workers", "4", "--frontier.weights-over", "3"], "weights_over 3 .*nearest.*: 2"),
        (["--sdp4bit.inter-gradients", "int4/100+hadamard32"], "100.*32.*96|100.*multiple of.*32"),
        (["--sdp4bit.weights", "int5"], "--sdp4bit.weights int5: "),
        (["--track", "tensorbored"], "did you mean 'tensorboard'"),
        (["--join", "nowhere"], "--join nowhere: must be HOST:PORT"),
        (["--tokenizer", "absent.json"], "absent.json"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--steps", "ten"], "--steps ten: must be a whole number, such as 1000"),
        (["--lr=fast"], "--lr fast: must be a number, such as 0.0003"),
        (["--dtype", "bf61"], "--dtype bf61: must be one of auto, bf16, fp32; did you mean 'bf16'"),
        (["--dtype", "half"], "--dtype half: must be one of auto, bf16, fp32$"),
        (["--powersgd.rank", "4.5"], "--powersgd.rank 4.5: must be a whole number; nearest: 5$"),
        (["--seed"], "--seed: needs a value, a whole number, such as"),
        (["--seed", "one", "--sed", "1"], "(?s)2 problems.*--sed; did you mean '--seed'.*--seed one: must be"),
        (["one.toml", "two.toml"], r"(?s)2 problems.*unexpected 'two.toml'.*one.toml does not exist"),
        (["--run-dir", "/dev/null/run"], "/dev/null is a file, not a folder; nearest: run$"),
        (["--run-dir", "/proc/run"], "no folder can be made in /proc: .*; nearest: run$"),
        (["--run-dir", "r" * 300], "no folder can be made in .*name too long"),
    ],
)
def test_bad_flags(tmp_path: Path, text: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, text, *flags)
    assert not (tmp_path / "run").exists() and not Path("run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no such file or folder; did you mean '.*text\.txt'"),
        (b"", "is empty"),
        (b"\0\1\2" * 100, "is a binary file"),
        (b"short", "has 6 tokens, and --seq-len 16 needs at least 34: .*; nearest: --seq-len 2, or more text"),
    ],
)
def test_bad_data(tmp_path: Path, text: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "texts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, path)
    assert not (tmp_path / "run").exists()


def test_ranks_that_can_not_be_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.launch.check_memory.machine_bytes", lambda: 5e6)
    with pytest.raises(ConfigError, match=r"weights and gradients of tiny take .* in each of 4 ranks .*: --workers 3"):
        train(tmp_path, "stdlib", "--model", "tiny", "--workers", "4")
    with pytest.raises(ConfigError, match="nearest: a smaller --model, or --memory"):
        train(tmp_path, "stdlib", "--model", "demo", "--workers", "4")


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, "missing.txt", "--strategy", "sdp4", "--lr", "-1", "--sed", "3", "--model", "tinny")
    for part in ("5 problems", "missing.txt", "sdp4bit", "--lr -1.0", "--seed", "tinny"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["train", "--sdp4bit.weights", "int9", "--sdp4bit.inter-gradients", "foo", "--optimizer", "adamm"],
            ["--sdp4bit.weights int9: ", "--sdp4bit.inter-gradients foo: ", "--optimizer adamm: no such optimizer"],
        ),
        (
            ["train", "--strategy", "diloco", "--inner", "powersgd", "--powersgd.rank", "0", "--diloco.codec", "bar"],
            ["--powersgd.rank 0 of powersgd", "--diloco.codec bar: "],
        ),
        (
            ["train", "--strategy", "lgreco-powersgd", "--powersgd.rank", "0", "--lgreco.alpha", "0"],
            ["rank 0 of powersgd", "alpha 0.0 of lgreco-powersgd"],
        ),
        (
            ["train", "--workers", "2", "--stages", "2", "--pipeline.plan", "foo", "--pipeline.forward", "int9"],
            ["--pipeline.plan foo is unknown", "--pipeline.forward int9: "],
        ),
        (["train", "--strategy", "sdp4", "--inner", "dpd"], ["--inner dpd: no such", "--strategy sdp4: no such"]),
        (["train", "--dgc.density", "2", "--dgc.momentum", "1"], ["density 2.0 ", "momentum 1.0 of dgc"]),
        (["train", "--workers", "4", "--order", "0,0"], ["which writes the results, first; nearest: --order 0 1 2 3"]),
        (
            ["train", "--workers", "4", "--order", "0,x"],
            ["--order 0 x: must be a list of whole numbers, such as 0 1 2"],
        ),
        (["codecs", "foo", "bar"], ["codec 'foo'", "codec 'bar'"]),
        (
            ["train", "--sdp4bit.weights", "int99", "--workers", "0"],
            ["--sdp4bit.weights int99: ", "--workers 0: must"],
        ),
        (
            ["train", "--mesh", "data=2,tensor=2", "--workers", "4", "--tensor", "1", "--stages", "2"],
            ["--tensor 1 and --mesh", "--stages 2 and --mesh"],
        ),
        (["plan", "--model", "tinny"], ["machine.json: No such file", "model 'tinny': no such preset"]),
    ],
)
def test_two_mistakes_on_one_line_are_both_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        cli.run(words)
    problems = caught.value.problems
    assert len(problems) == len(told) and all(any(part in one for one in problems) for part in told), problems


def test_a_port_in_use(tmp_path: Path, text: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use"):
            train(tmp_path, text, "--join", f"127.0.0.1:{port}", "--nodes", "2")


def test_a_run_directory_that_holds_a_run(tmp_path: Path, text: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume.*--overwrite"):
        train(tmp_path, text)
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_directory_without_write_permission(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root, as which tests may run, may write anywhere.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="is not writable"):
        train(tmp_path, text)


def test_a_change_that_a_resumed_run_can_not_make(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    save(run / "checkpoints", 4)
    (run / "config.toml").write_text("seed = 1\nmodel = 'tiny'\nstrategy = 'zero'\n")
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, text, "--resume", "--seed", "2", "--seq-len", "8", "--strategy", "sdp4bit")
    assert "seed was 1 and can't become 2" in str(caught.value)
    assert "seq_len was 256 and can't become 8" in str(caught.value)
    assert "strategy" not in str(caught.value), "another layout may go on"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["compare", "--rounds", "2.5"], "--rounds 2.5: must be a whole number; nearest: 3$"),
        (["explain", "--nodes", "two"], "--nodes two: must be a whole number, such as 2"),
        (["lab", "--nodes", "two", "--", "true"], "--nodes two: must be a whole number, such as 4"),
        (["export", "run", "folder", "--to", "hg"], "--to hg: must be hf"),
        (["explain", "--mesh", "nonsense=2"], "an axis 'nonsense': must be of island, .*; nearest: data$"),
        (["explain", "--zeropp.secondary", "yes"], "--zeropp.secondary yes: must be true or false, such as true"),
        (["generate"], "^thinwire generate needs RUN.DIR: The run directory, or the folder"),
    ],
)
def test_every_command_says_which_value_it_cannot_read(command: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cli.run(command)


def test_unknown_command() -> None:
    with pytest.raises(ConfigError, match="unknown command 'trian'; did you mean 'train'"):
        cli.run(["trian"])


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == cli.run(["--help"]) == 0
    assert capsys.readouterr().out.count("train") >= 2
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"thinwire {thinwire.__version__}\n"


def test_help_shows_the_common_flags_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*args: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            cli.run(["train", *args])
        assert not stopped.value.code
        return capsys.readouterr().out

    short, long = shown("--help"), shown("--help-all")
    assert "--tokens-per-step" in short and "[CONFIG.toml]" in short and "--help-all" in short
    assert "--checkpoint-every" not in short and "--sdp4bit" not in short and len(short.splitlines()) < 80
    for name in ("--tokens-per-step", "--checkpoint-every", "--sdp4bit.weights", "--llama.hidden-size"):
        assert name in long
    assert shown("-h", "--stepps", "3") == short


def test_every_flag_has_a_title_in_the_help() -> None:
    titled = [name for names in GROUPS.values() for name in names]
    assert sorted(titled) == sorted(item.name for item in fields(TrainConfig) if item.name != "tables")


def test_a_truth_of_a_table_is_written_as_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    tables = {"method": Documented}
    for word, value in {"true": True, "False": False}.items():
        line = CommandLine("program", LabOptions, tables=lambda: tables)
        for name in ("mixes", "keeps"):
            assert line.read([f"--method.{name}", word], problems := Problems())["method"] == {name: value}
            assert not problems.messages
    with pytest.raises(SystemExit):
        CommandLine("program", LabOptions, tables=lambda: tables).read(["--help-all"], Problems())
    shown = capsys.readouterr().out
    assert "--method.mixes {true,false}" in shown and "(default: false)" in shown


@dataclass(frozen=True)
class Documented:
    """A class."""

    bits: int = 4
    """Bits of a value
    on the wire."""
    group: int = 8
    mixes: bool = False
    keeps: bool | None = None


def test_help_is_the_docstring_under_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        CommandLine("program", LabOptions, tables=lambda: {"method": Documented}).read(["--help-all"], Problems())
    shown = capsys.readouterr().out
    assert "Bits of a value on the wire. (default: 4)" in shown and "--method.group" in shown
    assert "Machines to emulate. (default: 4)" in shown


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--stepps", "3", "--sed", "4"], ["unknown flag --stepps; did you mean '--steps'", "'--seed'"]),
        (["--stepps", "3", "--lr", "fast"], ["'--steps'", "--lr fast: must be a number, such as 0.0003"]),
        (["--lr", "fast", "--strategy", "sdp4"], ["--lr fast: must be a number", "did you mean 'sdp4bit'"]),
        (["--lr", "fast", "--seed", "x"], ["--lr fast: must be a number", "--seed x: must be a whole number"]),
        (["--seed", "--stepps", "3"], ["--seed: needs a value, a whole number", "'--steps'"]),
        (["--seed", "--dtype", "bf61"], ["--seed: needs a value", "did you mean 'bf16'"]),
        (["--two-way.threads", "3", "--steps", "3", "--lr", "fast"], ["'--twoway.threads'", "--lr fast: must be"]),
        (["--keep-best", "yes", "--sed=1"], ["--keep-best yes: takes no value", "'--seed'"]),
        (["absent.toml", "--sed", "1"], ["absent.toml does not exist", "'--seed'"]),
    ],
)
def test_two_mistakes_are_both_told(tmp_path: Path, text: Path, flags: list[str], told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, text, *flags)
    message = str(caught.value)
    assert message.startswith("2 problems") and all(part in message for part in told)


@pytest.mark.parametrize("flags", [["--stepps", "3"], ["--steps", "many"], ["--workers", "0"]])
def test_errors_exit_with_2(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["thinwire", "train", *flags])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr()
    assert stopped.value.code == 2 and flags[0] in said.err and not said.out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--workers 0", ["--workers 0: must be at least 1"]),
        (
            "--mesh data=3 --workers 2 --lr x --optimizer nope",
            ["--lr x: must", "--mesh data=3 has 3 ranks and the run has 2", "--optimizer nope: no such optimizer"],
        ),
        ("--mesh data=3,tensro=2 --workers x", ["--workers x: must be", "an axis 'tensro'"]),
    ],
)
def test_a_process_without_torch_tells_the_same(tmp_path: Path, flags: str, told: list[str]) -> None:
    command = [sys.executable, "-m", "thinwire", "train", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert all(part in done.stderr for part in told) and "Traceback" not in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "explain --nodess 3 --nodes 0 --rate fast --strategy sdp4",
            ["'--nodes'", "--nodes 0: must be from 1", "rate 'fast'", "'sdp4bit'"],
        ),
        ("plan --model tinny --outt x", ["'--out'", "machine.json: No such file", "did you mean 'tiny'"]),
        ("tune --outt x", ["'--out'", "machine.json: No such file"]),
        ("calibrate --workerss 2 --timeout 1e300", ["'--workers'", "--timeout 1e+300: must be at most"]),
        ("compare --timeoutt 3 --out test.txt", ["'--timeout'", "test.txt is a file"]),
    ],
)
def test_a_misspelt_flag_is_refused_before_torch_is_loaded(tmp_path: Path, words: str, told: list[str]) -> None:
    (tmp_path / "test.txt").touch()
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); import thinwire.cli as c; c.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert done.stderr.startswith(f"thinwire: {len(told)} problems") and all(part in done.stderr for part in told)


def test_a_flag_that_stands_twice_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    problems = Problems()
    args = ["--steps", "3", "--inject", "a", "--inject", "b", "--steps=4", "--data", "x"]
    assert command_line().read(args, problems)[""]["steps"] == 4 and not problems.messages
    assert capsys.readouterr().err == "thinwire: --steps stands 2 times: the last counts, --steps=4\n"


def test_a_reader_who_leaves_early_leaves_no_traceback() -> None:
    command = [sys.executable, "-m", "thinwire", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141 and not errors


def test_codecs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["codecs"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed[0] == "codec" and {"fp32", "int4/128", "int4/128+hadamard32", "topk1%/4096"} <= set(listed)
    assert cli.run(["codecs", "int4/64:bf16+hadamard32", "topk1%"]) == 0
    _, rotated, sparse = capsys.readouterr().out.splitlines()
    assert rotated.split("  ")[0] == "int4/64:bf16+hadamard32" and " 4.25 " in rotated
    assert rotated.endswith("unbiased, contraction, keeps zeros")
    assert sparse.startswith("topk1%/4096")
    for args, message in ((["itn4"], "codec 'itn4': .*did you mean 'int4'"), (["--helpp"], "did you mean '--help'")):
        with pytest.raises(ConfigError, match=message):
            cli.run(["codecs", *args])


def test_a_dry_run_shows_the_table_and_the_configuration_and_writes_nothing(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(
        tmp_path,
        text,
        "--dry-run",
        "--strategy",
        "powersgd",
        "--powersgd.rank",
        "2",
        "--sdp4bit.inter-gradients",
        "int8",
    )
    table, _, written = capsys.readouterr().out.partition("\n\n")
    assert "--sdp4bit.inter-gradients: no effect (strategy powersgd does not use it)" in table
    assert "strategy powersgd: powersgd (codecs: " in table and "topology: 1 node(s) x " in table
    assert "sent per rank and step: " in table
    config = tomllib.loads(written)
    assert config["strategy"] == "powersgd" and config["powersgd"] == {"rank": 2} and config["tokens_per_step"] == 32
    assert "dry_run" not in config and not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()
    with pytest.raises(ConfigError, match="2 problems"):
        train(tmp_path, text, "--dry-run", "--workers", "0", "--strategy", "sdp4")
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*tokenizer 'bad.json'.*model hf:bad: no such folder"):
        train(tmp_path, text, "--dry-run", "--model", "hf:bad", "--tokenizer", "bad.json")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"no run to go on with; did you mean '.*notes'"):
        RunDir(tmp_path / "nots").check(0, resume=True, overwrite=False)


def test_the_launcher_builds_the_strategy_once(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    check = SDP4Bit.__post_init__

    def noting(self: SDP4Bit) -> None:
        built.append(self.name)
        check(self)

    monkeypatch.setattr(SDP4Bit, "__post_init__", noting)
    with pytest.raises(AssertionError, match="a process would have been started"):
        train(tmp_path, text, "--workers", "2")
    assert built == ["sdp4bit"]


def test_completion_knows_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for word in ("train", "--steps", "--sdp4bit.weights", "--local-rate", "--max-kl", "bf16"):
        assert f"'{word}'" in script or f'"{word}"' in script or f" {word} " in script, word
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert cli.run(["completion", "zsh"]) == 0 and "#compdef thinwire" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="completion fish: no such shell; did you mean 'zsh'"):
        cli.run(["completion", "fish"])
