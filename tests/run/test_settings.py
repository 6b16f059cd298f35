from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ConfigError, Problems
from thinwire.launch.line import read_config
from thinwire.methods.data.sdp4bit import SDP4Bit
from thinwire.models.build import build_model
from thinwire.optim import DionOptimizer
from thinwire.run.config import TrainConfig
from thinwire.run.optimizer import optimizer_over, read_optimizer
from thinwire.run.places import residency_options
from thinwire.run.run import Run
from thinwire.run.settings import to_toml


def read(*args: str) -> TrainConfig:
    problems = Problems()
    config = read_config(args, problems)
    problems.raise_any()
    return config


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('steps = 7\nmicro-batch = 3\nlr = 1\ntrack = ["wandb"]\n[sdp4bit]\nweights = "int8"\n')
    return path


def test_a_limit_of_the_process_is_a_budget_that_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (900_000_000, -1))
    limited, stated = read(), read("--memory", "900mb")
    assert (limited.memory, stated.memory) == ("900000000b", "900mb")
    assert "memory" not in to_toml(limited) and 'memory = "900mb"' in to_toml(stated)


def test_defaults_then_file_then_flags(toml: Path) -> None:
    assert read() == TrainConfig()
    from_file = read(str(toml))
    assert (from_file.steps, from_file.micro_batch, from_file.lr) == (7, 3, 1)
    assert from_file.track == ("wandb",) and from_file.tables == {"sdp4bit": {"weights": "int8"}}
    flags = read(str(toml), "--steps", "9", "--sdp4bit.vector-weights", "int4/64:bf16", "--track", "trackio")
    assert (flags.steps, flags.micro_batch, flags.track) == (9, 3, ("trackio",))
    assert flags.tables == {"sdp4bit": {"weights": "int8", "vector_weights": "int4/64:bf16"}}


def test_another_way_to_lie_on_the_ranks_replaces_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("workers = 4\nstages = 2\ntensor = 2\n")
    assert read(str(path)).mesh_shape.sizes == {"pipeline": 2, "data": 1, "tensor": 2}
    assert read(str(path), "--mesh", "data=4").mesh_shape.sizes == {"data": 4}
    assert read(str(path), "--tensor", "1").mesh_shape.sizes == {"pipeline": 2, "data": 2}
    path.write_text('workers = 4\nmesh = "data=4"\n')
    assert read(str(path), "--tensor", "2").mesh_shape.sizes == {"data": 2, "tensor": 2}


def test_a_flag_replaces_what_the_file_states_by_the_other_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[residency]\nmemory = "2gb"\nslices = 4\ndurable = true\n')
    stated = {"memory": "1gb", "slices": 2, "durable": True}
    assert residency_options(read(str(path), "--memory", "1gb", "--slices", "2")) == stated
    path.write_text('memory = "2gb"\nslices = 4\n[residency]\ndurable = true\n')
    flags = ("--residency.memory", "1gb", "--residency.slices", "2")
    assert residency_options(read(str(path), *flags)) == stated
    with pytest.raises(ConfigError, match="give one of them"):
        residency_options(read(str(path), "--memory", "3gb", *flags))
    # A limit of the shell is no third statement.
    monkeypatch.setattr("resource.getrlimit", lambda _: (900_000_000, -1))
    assert residency_options(read(*flags))["memory"] == "1gb"


def test_islands_are_cut_inside() -> None:
    asked = ("--workers", "8", "--strategy", "diloco", "--stages", "2")
    assert read(*asked).mesh_shape.sizes == {"island": 4, "pipeline": 2, "data": 1}
    assert read(*asked, "--local-size", "4").mesh_shape.sizes == {"island": 2, "pipeline": 2, "data": 2}
    assert read(*asked, "--tensor", "2").mesh_shape.sizes == {"island": 2, "pipeline": 2, "data": 1, "tensor": 2}
    with pytest.raises(ConfigError, match="islands of 3 ranks can't be cut so; nearest: --local-size 2"):
        _ = read(*asked, "--local-size", "3").mesh_shape


def test_a_flag_may_restore_the_default_over_the_file(toml: Path) -> None:
    assert read(str(toml), "--steps", str(TrainConfig().steps)).steps == TrainConfig().steps


def test_what_is_written_reads_back(tmp_path: Path, toml: Path) -> None:
    config = read(str(toml), "--prompt", 'a "b"\n\\c \x7f é', "--local-size", "1", "--llama.hidden-size", "64")
    path = tmp_path / "written.toml"
    path.write_text(to_toml(config))
    assert read(str(path)) == config


def test_what_is_written_leaves_out_resume_overwrite_and_unused_tables(tmp_path: Path) -> None:
    config = read("--overwrite", "--strategy", "zero", "--sdp4bit.weights", "int8", "--stop-at", "3")
    written = to_toml(config)
    assert not any(name in written for name in ("overwrite", "resume", "stop_at", "sdp4bit"))


def test_resume_takes_the_configuration_of_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("steps = 11\nseed = 5\n")
    config = read("--run-dir", str(tmp_path), "--resume", "--steps", "12")
    assert (config.steps, config.seed, config.resume) == (12, 5, True)
    assert read("--run-dir", str(tmp_path), "--resume", "auto", "--steps", "12") == config
    assert read("--resume=auto", "--run-dir", str(tmp_path), "--steps", "12") == config
    assert read("--run-dir", str(tmp_path)).seed == 0


def test_a_switch_may_be_said_again_or_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("keep_best = true\n")
    assert read(str(path), "--keep-best").keep_best and read("--keep-best", str(path)).keep_best
    assert not read(str(path), "--no-keep-best").keep_best


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--resume", "last"], r"--resume last: .*newest sound checkpoint in --run-dir; nearest: --resume auto"),
        (["--keep-best", "maybe"], r"--keep-best maybe: takes no value; say --keep-best alone"),
        (["--no_checked=yes"], r"--no-checked yes: takes no value"),
        (["--keep-best", "auto"], r"--keep-best auto: takes no value"),
        (["--resume", "missing.toml"], r"missing\.toml does not exist"),
        (["--memory", "2", "gb"], r"configuration file gb does not exist; a size is one word, such as 2gb"),
        (["--resume", "/dev"], r"--resume /dev: takes no folder, .*; nearest: --resume --run-dir /dev"),
        (["/dev"], r"configuration file /dev: is a folder, and must be a file; it holds no \.toml file"),
        (["/dev/null/x"], r"configuration file /dev/null/x can't be read: Not a directory"),
    ],
)
def test_a_switch_takes_no_value(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*args)


def test_all_wrong_keys_and_flags_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('stepz = 1\nlr = "fast"\ndtype = "fp8"\n[sdp4bit]\nweigths = "int4"\nvector_weights = 3\n')
    with pytest.raises(ConfigError) as caught:
        read(str(path), "--sed", "4", "--sdp4bit.weight", "int4")
    message = str(caught.value)
    for part in (
        "7 problems",
        "unknown flag --sed; did you mean '--seed'?",
        "unknown flag --sdp4bit.weight; did you mean '--sdp4bit.weights'?",
        "unknown key 'stepz'; did you mean 'steps'?",
        "lr = 'fast': must be a number",
        "dtype = 'fp8': must be one of auto, bf16, fp32",
        "[sdp4bit] unknown key 'weigths'; did you mean 'weights'?",
        "[sdp4bit] vector_weights = 3: must be a string",
    ):
        assert part in message


@pytest.mark.parametrize("content", ["steps = ", "steps = true\n", "sdp4bit = 3\n"])
def test_broken_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        read(str(path))


def test_missing_file_names_the_nearest(toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; did you mean '.*run\.toml'"):
        read(str(toml.with_name("runn.toml")))


def test_values_that_cannot_be_read_come_with_the_other_problems() -> None:
    with pytest.raises(ConfigError, match=r"(?s)3 problems.*'--seed'\?.*--steps many.*--lr x") as caught:
        read("--steps", "many", "--sed", "1", "--lr", "x")
    assert caught.value.exit_code == 2


def test_codecs_are_written_as_they_were_stated(tmp_path: Path) -> None:
    texts: dict[str, Any] = {
        "weights": "int4", "intra_gradients": "int8/64+hadamard32", "inter_gradients": "topk0.5%:(int4:bf16)",
        "vector_weights": "fp32", "vector_gradients": "int8:nearest:bf16+zstd",
    }  # fmt: skip
    flags = [word for name, text in texts.items() for word in (f"--sdp4bit.{name.replace('_', '-')}", text)]
    path = tmp_path / "written.toml"
    path.write_text(to_toml(read(*flags)))
    config = read(str(path))
    assert config.tables == {"sdp4bit": texts} and Run.of(config).strategy == SDP4Bit(**texts)
    with pytest.raises(ConfigError, match=r"--sdp4bit.inter-gradients int5: integer bits 5.*nearest is 4"):
        Run.of(read(str(path), "--sdp4bit.inter-gradients", "int5"))


def test_strategies_take_their_table() -> None:
    strategy = Run.of(read("--strategy", "sdp4bit-gradients", "--sdp4bit.inter-gradients", "int3/64")).strategy
    assert "inter_gradients='int3/64'" in str(strategy) and "weights='fp32'" in str(strategy)
    assert str(Run.of(read("--strategy", "powersgd", "--powersgd.rank", "2")).strategy).startswith("PowerSGD(rank=2")
    assert "find_unused_parameters=True" in str(
        Run.of(read("--strategy", "ddp-bf16", "--ddp.find-unused-parameters", "True")).strategy
    )
    with pytest.raises(ConfigError, match="rank 0 of powersgd"):
        Run.of(read("--strategy", "powersgd", "--powersgd.rank", "0"))
    with pytest.raises(ConfigError, match="did you mean 'sdp4bit'"):
        Run.of(TrainConfig(strategy="sdp4bits"))
    with pytest.raises(ConfigError):
        Run.of(read("--sdp4bit.inter-gradients", "int4/100+hadamard32"))


def test_a_strategy_chooses_its_optimizer_and_refuses_what_it_cannot_drive() -> None:
    assert Run.of(read()).config.optimizer == "adamw"
    assert Run.of(read("--strategy", "ddp", "--optimizer", "lans")).config.optimizer == "lans"
    with pytest.raises(ConfigError, match=r"--optimizer adam: no such optimizer; did you mean 'adamw'"):
        Run.of(read("--optimizer", "adam"))
    with pytest.raises(ConfigError, match=r"lans does not fit strategy zero, which cuts tensors.*choose one of adamw"):
        Run.of(read("--strategy", "zero", "--optimizer", "lans"))
    inside = "--strategy", "sparseloco", "--inner", "demo"
    assert Run.of(read(*inside)).config.optimizer == "sgd-plain"
    with pytest.raises(ConfigError, match=r"adamw does not fit --inner demo, which keeps .* choose one of sgd-plain"):
        Run.of(read(*inside, "--optimizer", "adamw"))


def test_an_optimizer_has_its_options_in_brackets() -> None:
    asked = "dion[rank=8,codec=int8/64,betas=[0.8,0.9]]"
    assert read_optimizer(asked) == ("dion", {"rank": 8, "codec": "int8/64", "betas": (0.8, 0.9)})
    assert Run.of(read("--optimizer", asked)).config.optimizer == asked
    optimizer = optimizer_over(asked, build_model("tiny", 256, 16), lr=0.1, weight_decay=0.2, seed=0)
    assert isinstance(optimizer, DionOptimizer) and optimizer.rank == 8
    assert all(group["betas"] == (0.8, 0.9) and group["lr"] == 0.1 for group in optimizer.param_groups)
    for text, rules in (
        ("dion[rnk=8,momentum=x]", ["has no option 'rnk'; did you mean 'rank'", "momentum = 'x': must be a number"]),
        ("dion[rank=0]", ["dion rank 0: must be at least 1; nearest: 1"]),
        ("apollo[channels=columns]", ["apollo channels columns: must be one of larger and rows"]),
        ("adamw[eps=-1.0]", ["Invalid epsilon value"]),
        ("adamw[lr=1.0]", ["has no option 'lr'"]),
        ("muon[codec=int8/64", ["must be NAME or NAME"]),
        ("muon[codec]", ["'codec' must be option=value"]),
    ):
        with pytest.raises(ConfigError) as caught:
            read_optimizer(text)
        assert all(rule in str(caught.value) for rule in rules) and f"--optimizer {text}: " in str(caught.value)


def test_a_flag_of_an_axis_decides_over_the_mesh_of_a_file_and_keeps_its_other_axes(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('workers = 4\nmesh = "data=1,sequence=2,expert=2"\n[experts]\ndispatch = "int8"\n')
    config = read(str(path), "--workers", "2", "--experts.parallel", "1")
    assert config.mesh is None and dict(config.mesh_shape.sizes) == {"data": 1, "sequence": 2}
    assert config.tables["experts"]["dispatch"] == "int8"
    path.write_text('workers = 4\nmesh = "data=1,pipeline=2,tensor=2"\n')
    assert dict(read(str(path), "--stages", "1").mesh_shape.sizes) == {"data": 2, "tensor": 2}
    path.write_text('model = "moe-tiny"\nworkers = 4\n[experts]\nparallel = 4\n')
    assert dict(read(str(path), "--mesh", "data=4").mesh_shape.sizes) == {"data": 4}


def test_a_resume_on_fewer_ranks_than_a_node_had_forgets_the_size_of_its_nodes(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("workers = 4\nlocal-size = 2\n")
    resume = "--resume", "--run-dir", str(tmp_path)
    assert read(*resume, "--workers", "1").local_size is None
    assert read(*resume, "--workers", "2").local_size == 2
    (tmp_path / "config.toml").write_text("workers = 4\n[experts]\nparallel = 2\n[sequence]\nparallel = 2\n")
    with pytest.raises(
        ConfigError,
        match=r"^--experts\.parallel 2: must divide the 1 rank that --sequence\.parallel 2 leaves; nearest: "
        r"--experts\.parallel 1, or --sequence\.parallel 1; a resume takes what no flag states from the run's conf",
    ):
        read(*resume, "--workers", "2").num_shares  # noqa: B018
    assert read(*resume, "--workers", "1", "--local-size", "2").local_size == 2
