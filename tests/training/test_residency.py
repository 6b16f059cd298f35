"""What of a run lies where, before it starts: what is chosen, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.alone import small_config, trainer_of
from tests.workers import run_workers
from thinwire.calibration.process import USUAL
from thinwire.device import Device
from thinwire.errors import ConfigError, Problems
from thinwire.hosts.offload import replicas
from thinwire.hosts.offload.hollow import is_hollow
from thinwire.hosts.offload.sampling import linear_layers
from thinwire.hosts.sharded import passing
from thinwire.hosts.sharded.bucket import FlatBucket
from thinwire.launch.check_memory import check_residency
from thinwire.launch.line import read_config
from thinwire.launch.prepare import check_norms, plan
from thinwire.methods.memory import Floor, Residency, efficiency, intensities, placed
from thinwire.methods.memory.floor import num_held
from thinwire.models.build import build_model, build_skeleton
from thinwire.models.hf import build_hf
from thinwire.optim import mfac
from thinwire.planner.command import run_explain
from thinwire.report.units import bytes_text
from thinwire.run import residency as run_residency
from thinwire.run.config import TrainConfig
from thinwire.run.residency import resolved
from thinwire.run.run import Run
from thinwire.run.run_dir import RunDir
from thinwire.training.engine import built
from thinwire.training.soonest import ChosenResidency
from thinwire.training.start_rows import norms_row

CUT = ["--workers", "2", "--frontier.weights-over", "2", "--frontier.gradients-over", "2"]


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker takes before it has a model is the same on every machine."""
    for room in ("run", "planner"):
        monkeypatch.setattr(f"thinwire.{room}.residency.process_memory", lambda: USUAL)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--memory", "2 gigs"], "did you mean '2gb'"),
        (["--memory", "300mb"], "is below the floor of"),
        (["--store", "~nobody-at-all/x"], "there is no such user; nearest: '/var/tmp/thinwire'"),
        (["--residency.disk-rate", "-1MB/s", "--store", "/var/tmp"], "did you mean '2gb/s'"),
        (["--residency.durable", "true", "--store", "none"], "needs one: --residency.durable true; nearest: a folder"),
        (["--store", "/dev/shm/x"], "lies on tmpfs, which is memory and not a disk"),
        (["--memory", "2gb", "--strategy", "ddp"], "ddp keeps all it has in memory; nearest that does not: sdp4bit"),
        (
            ["--memory", "2gb", "--strategy", "zeropp"],
            "zeropp keeps all it has in memory; nearest that does not: sdp4bit",
        ),
        (["--memory", "2gb", "--optimizer", "muon"], "muon looks across matrices"),
        (["--memory", "2gb", "--strategy", "diloco", "--inner", "ddp"], "ddp keeps all it has in memory"),
        (["--store", "/var/tmp", "--strategy", "diloco", "--inner", "zero", "--residency.durable", "true"],
         "agree on a step only when they exchange"),
        (["--memory", "2gb", "--residency.memory", "3gb"], "--memory 2gb and --residency.memory 3gb: give one"),
        (["--memory", "2gb", "--residency.tile", "8"], "nearest: '1x8'"),
        (["--memory", "2gb", "--residency.tile", "1x8"], "nearest: model.embed_tokens=1x8"),
        (["--residency.tile", "head=2x8", "--loss", "cut"], "nearest: --residency.tile lm_head=1x16"),
        (["--residency.tile", "head=1x8", "--optimizer", "apollo"], "tile: apollo looks across matrices"),
        (["--residency.tile", "head=1x8", "--strategy", "frontier", *CUT], "frontier gathers weights by layers, whole"),
        (["--slices", "9", "--micro-batch", "4"], "a micro-batch has 4 sequences; nearest: --slices 4"),
        (["--slices", "2", "--documents", "true"], "--slices with --documents"),
        (["--slices", "2", "--model", "moe-tiny", "--moe.router", "noisy"], "slices beside router 'noisy'"),
        (["--memory", "2gb", "--workers", "2", "--sequence.parallel", "2"], "or --activations recompute and nothing"),
        (["--memory", "2gb", "--workers", "2", "--stages", "2"], "residency beside an axis pipeline: not supported"),
        (
            ["--activations", "sample:0.3", "--workers", "2", "--stages", "2"],
            "sample:0.3 beside an axis pipeline: not supported, because its micro-batches overlap",
        ),
        (
            ["--memory", "2gb", "--optimizer", "apollo", "--residency.gradients", "disk"],
            "memory, or, for an Apollo that limits its updates, step",
        ),
        (
            ["--memory", "2gb", "--optimizer", "apollo", "--residency.states", "int8/64"],
            "states int8/64 rounds state that each element has; nearest: --residency.states fp32",
        ),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    problems = Problems()
    with pytest.raises(ConfigError) as error:
        words = ["--model", "tiny", "--run-dir", str(tmp_path / "run"), *words]
        plan(read_config(words, problems), problems)
    assert told in str(error.value)


def test_what_a_run_finds_of_its_own_on_the_disk_needs_no_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run goes on, and a run takes the place of another; files that stay where they are take their space."""
    skeleton, run_dir = build_skeleton("tiny", 256, 256), RunDir(tmp_path)
    durable, plain = {"durable": True, "sub_group": 1024}, {"optimizer": "disk", "sub_group": 1024}

    def checked(overwrite: bool, options: dict[str, Any]) -> None:
        config = TrainConfig(
            model="tiny", workers=2, run_dir=str(tmp_path), overwrite=overwrite, tables={"residency": options}
        )
        check_residency(config, Run.of(config), skeleton)

    monkeypatch.setattr("thinwire.tiers.mount.os.statvfs", lambda _: SimpleNamespace(f_bavail=4096, f_frsize=1))
    told = r"needs \d+\.\d\d MB and the disk has 0\.00 MB free"
    with pytest.raises(ConfigError, match=told):
        checked(False, durable)
    (run_dir.store / "rank0").mkdir(parents=True)
    with (run_dir.store / "rank0" / "master").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 40_000_000)
    checked(False, durable)
    checked(True, plain)
    with pytest.raises(ConfigError, match=told):
        checked(False, plain)


def test_a_budget_decides_what_lies_where() -> None:
    """125m on 4 ranks: 340 MB of weights, as much of gradients; activations a sequence 235 MB, 360 MB in bf16."""
    skeleton = build_skeleton("125m", 256, 256)
    chosen = {}
    cases: list[tuple[str, Any]] = [("4gb", "bf16"), ("1100mb", "fp32"), ("1150mb", "auto"), ("750mb", "fp32")]
    cases.append(("700mb", "fp32"))
    for memory, dtype in cases:
        config = TrainConfig(
            model="125m", workers=4, local_size=1, micro_batch=1, memory=memory, store="/var/tmp", dtype=dtype
        )
        residency, setup = resolved(Run.of(config), skeleton)
        chosen[memory, dtype] = residency.weights, residency.gradients, residency.activations
        Floor.of(residency, setup).check(residency.memory_bytes)
    expected = [("memory", "memory", "keep"), ("disk", "memory", "keep"), ("disk", "disk", "keep")]
    expected += [("disk", "disk", "recompute"), ("disk", "disk", "recompute:disk")]
    assert chosen == dict(zip(cases, expected, strict=True))


def test_weights_lie_where_a_step_moves_less() -> None:
    """On one rank of 125m, states that don't fit beside weights move more than weights that pass through memory."""
    skeleton, moved = build_skeleton("125m", 256, 256), {}
    for workers, memory in ((1, "2400mb"), (4, "2400mb")):
        for where in ("auto", "memory", "disk"):
            config = TrainConfig(
                model="125m", workers=workers, local_size=1, micro_batch=1, memory=memory, store="/var/tmp",
                dtype="fp32", tables={"residency": {"weights": where}},
            )  # fmt: skip
            residency, setup = resolved(Run.of(config), skeleton)
            moved[workers, where] = sum(part.read + part.written for part in placed(residency, setup))
            assert where != "auto" or residency.weights == ("disk" if workers == 1 else "memory")
    assert moved[1, "auto"] == moved[1, "disk"] < moved[1, "memory"]
    assert moved[4, "auto"] == moved[4, "disk"] == moved[4, "memory"] == 0


def test_a_layer_that_is_computed_again_is_read_once_more_where_it_does_not_stay() -> None:
    """125m on one rank: 12 layers of 28.3 MB, whose largest matrices have 6.3 MB each."""
    skeleton = build_skeleton("125m", 256, 256)
    options = {"weights": "disk", "gradients": "disk", "activations": "recompute"}
    config = TrainConfig(
        model="125m", workers=1, local_size=1, micro_batch=1, store="/var/tmp", memory="2gb",
        tables={"residency": options},
    )  # fmt: skip
    floor = Floor.of(*resolved(Run.of(config), skeleton)).num_bytes // 10**6
    for more in (20, 250):
        residency, setup = resolved(Run.of(replace(config, memory=f"{floor + more}mb")), skeleton)
        weights = next(part for part in placed(residency, setup) if part.name == "weights")
        small, bucket = setup.plan.weights - weights.disk, setup.largest_bytes
        kept = weights.memory - small - bucket
        of_layers = 12 * (4 * (4 * 768**2 + 3 * 768 * 2048) - kept)
        # One rank overwrites its weights in an update, and reads none for it.
        assert weights.read == 2 * (weights.disk - kept) + max(0, of_layers) and (of_layers > 0) == (more == 20)


def test_an_update_reads_the_part_of_this_rank_where_what_others_send_may_wait() -> None:
    """125m on four ranks, with room for what waits and without; without differences, and where steps are durable."""
    skeleton, reads = build_skeleton("125m", 256, 256), {}
    for name, strategy, memory, durable in (
        ("waits", "sdp4bit", None, False), ("fits", "sdp4bit", "more", False), ("small", "sdp4bit", "least", False),
        ("durable", "sdp4bit", None, True), ("overwritten", "zero", None, False),
    ):  # fmt: skip
        options: dict[str, Any] = {"weights": "disk", "gradients": "disk", "activations": "keep"}
        options |= {"durable": durable, "sub_group": 100_352}
        config = TrainConfig(
            model="125m", workers=4, local_size=1, micro_batch=1, store="/var/tmp", strategy=strategy,
            memory=memory and "4gb", tables={"residency": options},
        )  # fmt: skip
        if memory is not None:
            floor = Floor.of(*resolved(Run.of(config), skeleton)).num_bytes
            # What waits takes 4.25 bits of each of 85 million elements, and two thirds of what is left beside 100 MB.
            more = {"least": 20, "more": 100 + 72}[memory]
            config = replace(config, memory=f"{floor // 10**6 + more}mb")
        residency, setup = resolved(Run.of(config), skeleton)
        weights = next(part for part in placed(residency, setup) if part.name == "weights")
        in_passing = num_held(residency) * setup.largest_bytes
        waiting = weights.memory - (setup.plan.weights - weights.disk) - in_passing
        reads[name] = weights.read / (weights.disk - in_passing + setup.largest_bytes), waiting > 0
    tolerance = 0.03
    assert reads["waits"] == (pytest.approx(2.25, rel=tolerance), True)
    assert reads["fits"] == (pytest.approx(2.25, rel=tolerance), True)
    assert reads["small"] == (pytest.approx(3, rel=tolerance), False)
    assert reads["durable"] == (pytest.approx(3, rel=tolerance), False)
    assert reads["overwritten"] == (pytest.approx(2, rel=tolerance), False)


def test_the_nearest_budget_is_large_enough() -> None:
    skeleton, common = build_skeleton("125m", 256, 256), {"model": "125m", "store": "/var/tmp", "micro_batch": 1}
    below = TrainConfig(workers=4, local_size=1, memory="500mb", **common)  # type: ignore[arg-type]
    floor = Floor.of(*resolved(Run.of(below), skeleton))
    with pytest.raises(ConfigError, match=r"activations .* MB; nearest: --memory") as error:
        floor.check(500_000_000)
    near = str(error.value).split("--memory ")[-1].split(",")[0]
    residency, setup = resolved(Run.of(replace(below, memory=near)), skeleton)
    floor = Floor.of(residency, setup)
    floor.check(residency.memory_bytes)
    # The floor is what is needed, and not what would be comfortable.
    assert residency.memory_bytes is not None and residency.memory_bytes < 1.02 * floor.num_bytes


def test_a_floor_says_what_a_build_for_gpus_takes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = build_skeleton("demo", 256, 256)
    config = TrainConfig(model="demo", workers=2, store="/var/tmp", memory="600mb")

    def told(data: int, build: str | None, num_gpus: int) -> bool:
        monkeypatch.setattr("thinwire.run.residency.process_memory", lambda: replace(USUAL, data=data))
        monkeypatch.setattr("torch.version.cuda", build)
        monkeypatch.setattr("thinwire.methods.memory.floor.num_gpus", lambda: num_gpus)
        with pytest.raises(ConfigError, match="below the floor of") as error:
            Floor.of(*resolved(Run.of(config), skeleton)).check(1)
        return "torch's CPU build: this one is for CUDA 13.0, and about 520 MB of the process" in str(error.value)

    assert told(10**9, "13.0", 0)
    assert not told(10**9, "13.0", 1) and not told(10**9, None, 0) and not told(USUAL.data, "13.0", 0)


def test_where_all_lies_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "demo", "--nodes", "4", "--micro-batch", "1", "--memory", "600mb", "--disk-rate", "100MB/s"]
    assert run_explain([*words, "--strategy", "sdp4bit", "--gflops", "10"]) == 0
    out = capsys.readouterr().out
    for part in ("where all lies", "masters and optimizer state", "of the disk in a step", "memory in use: "):
        assert part in out
    # The tables agree: what a rank would hold without the budget is in none of them.
    lines = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if line.count("│") > 3]
    cells = {name: sizes[:2] for _, name, *sizes in lines}
    assert cells["sdp4bit"] == cells["together"] and "what one rank holds" not in out
    # 256 tokens and 100 MB/s to 10 GFLOP/s; states are cut over four disks, and moved for a quarter as many operations.
    assert "efficiency: weights 0.72, masters and optimizer state 0.72, inputs of layers 0.99" in out
    assert "at 10 GFLOP/s, as --gflops says" in out and "of a step (no other way fits)" in out
    assert run_explain([*words, "--rate", "100mbit"]) == 0
    out = capsys.readouterr().out
    assert "--strategy all: sdp4bit with --memory" in out and "half of a matrix product's here; --gflops states" in out
    assert run_explain(words[:-2]) == 0
    assert "efficiency: not known (the disk's rate is missing: name it" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="name one strategy"):
        run_explain([*words, "--strategy", "zero,sdp4bit"])
    with pytest.raises(ConfigError, match="muon looks across matrices, and would hold all of them"):
        run_explain([*words, "--optimizer", "muon"])


def test_what_auto_takes_at_stated_rates_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """States that move 2 MB in a step are awaited at 1 MB/s; layers are computed again sooner."""
    words = ["--model", "tiny", "--memory", "660mb", "--micro-batch", "2", "--gflops", "20", "--strategy", "sdp4bit"]
    for rate, taken in (("5GB/s", "keep"), ("1MB/s", "recompute")):
        assert run_explain([*words, "--disk-rate", rate]) == 0
        way = f"--residency.weights memory --residency.gradients memory --activations {taken}: "
        assert f"auto: {way}" in (out := capsys.readouterr().out) and "none is clearly sooner" in out
    # Weights on the disk beside such that frontier cuts: bytes of the disk over four ranks.
    words = ["--model", "125m", "--memory", "700mb", "--nodes", "4", "--micro-batch", "1", "--disk-rate", "1MB/s"]
    assert run_explain([*words, "--rate", "100mbit", "--gflops", "10"]) == 0
    assert "cut over 4 ranks, as frontier can" in capsys.readouterr().out


def test_state_of_other_optimizers_is_counted(tmp_path: Path) -> None:
    """M-FAC keeps 32 gradients on the disk. A budget holds the largest piece and three pages of its window."""
    skeleton = build_skeleton("demo", 256, 256)
    floors = {}
    for optimizer in ("adamw", "apollo", "mfac"):
        config = TrainConfig(
            model="demo", workers=4, local_size=1, micro_batch=1, memory="2gb", store="/var/tmp", optimizer=optimizer
        )
        floors[optimizer] = Floor.of(*resolved(Run.of(config), skeleton))
    numel = sum(param.numel() for param in skeleton.parameters())
    least = min(floors["adamw"].disk, 12 * numel // 4)
    # Master, momentum and 32 rows of the window, of a quarter of the elements.
    assert floors["mfac"].disk == pytest.approx(34 * 4 * numel / 4, rel=0.02) and least == pytest.approx(3 * numel)
    assert floors["apollo"].disk < floors["adamw"].disk
    largest = max(param.numel() for param in skeleton.parameters())
    assert floors["mfac"].parts["optimizer"] == pytest.approx(2 * 4 * largest / 4 + 3 * 4 * mfac.PAGE_NUMEL, rel=0.02)
    assert floors["apollo"].parts["sums"] > 0
    # A durable step has two slots of all, and of the weights that belong to the masters.
    durable, setup = resolved(Run.of(replace(config, tables={"residency": {"durable": True}})), skeleton)
    assert Floor.of(durable, setup).disk == 2 * (floors["mfac"].disk + setup.states.masters)
    states = next(part for part in placed(durable, setup) if part.name == "masters and optimizer state")
    assert states.disk == Floor.of(durable, setup).disk
    assert states.written == setup.states.whole + setup.states.masters


def test_a_sample_of_activations_is_what_a_budget_must_hold() -> None:
    skeleton, floors = build_skeleton("125m", 256, 256), {}
    for activations in ("keep", "sample:0.3", "recompute", "recompute+sample:0.3"):
        config = TrainConfig(
            model="125m", workers=4, local_size=1, memory="4gb", micro_batch=4, activations=activations
        )
        floors[activations] = Floor.of(*resolved(Run.of(config), skeleton)).parts["activations"]
    assert floors["sample:0.3"] < 0.9 * floors["keep"]
    assert floors["recompute+sample:0.3"] < floors["recompute"] < floors["sample:0.3"]


def test_efficiency_is_that_of_the_paper() -> None:
    """ZeRO-Infinity, section 4: 2,048 tokens, 60 GB/s, 70 TFLOP/s; four times the batch. And what hides which part."""
    parts = intensities(1024, 2, 2048)
    assert efficiency(parts["weights"], 70e9, 70e12) == pytest.approx(0.5, abs=0.01)
    assert efficiency(parts["masters and optimizer state"], 1.5e12, 70e12) == pytest.approx(0.9, abs=0.02)
    assert efficiency(parts["inputs of layers"], 2e9, 70e12) > 0.5
    assert efficiency(2048, 60e9, 70e12) == pytest.approx(0.637, abs=1e-3)
    assert efficiency(8192, 60e9, 70e12) == pytest.approx(0.875, abs=1e-3)


def test_what_islands_exchange_is_counted_and_a_rank_shares_with_its_own_island() -> None:
    skeleton, common = build_skeleton("demo", 256, 256), {"model": "demo", "store": "/var/tmp", "micro_batch": 1}
    alone = TrainConfig(workers=2, local_size=1, memory="2gb", strategy="sdp4bit", **common)  # type: ignore[arg-type]
    islands = replace(alone, strategy="diloco", inner="sdp4bit")
    plain, outer = (Floor.of(*resolved(Run.of(config), skeleton)) for config in (alone, islands))
    numel = sum(param.numel() for param in skeleton.parameters())
    more = sum(num_bytes for name, num_bytes in outer.parts.items() if name not in plain.parts)
    # Outer parameters and momentum; and a rank of an island of one has all masters.
    assert more >= 8 * numel and outer.disk == pytest.approx(2 * plain.disk, rel=0.01) and "packets" not in outer.parts


def test_norms_of_sequences_that_come_again_must_fit_on_the_disk(tmp_path: Path) -> None:
    config = TrainConfig(
        model="tiny",
        workers=2,
        steps=10**12,
        tokens_per_step=1024,
        activations="sample:0.3",
        run_dir=str(tmp_path / "r"),
    )
    check_norms(Run.of(config), 1000)
    with pytest.raises(ConfigError, match=r"needs .* [MG]B and the disk has"):
        check_norms(Run.of(config), 10**12)
    # None is seen twice; and without a store they lie in memory.
    check_norms(Run.of(replace(config, steps=10)), 10**12)
    check_norms(Run.of(replace(config, store="none")), 10**12)


def test_the_table_says_how_large_norms_become() -> None:
    """16 bytes of tokens' norms for each of the layers, of half of 1001 sequences."""
    model = build_model("tiny", 300, 8)
    engine: Any = SimpleNamespace(
        come_again=True, config=SimpleNamespace(seq_len=8), model=model, loader=SimpleNamespace(num_sequences=1001),
        optimizer=SimpleNamespace(comm=SimpleNamespace(world_size=2)),
        choice=ChosenResidency(Residency(optimizer="memory", activations="sample:0.3")),
    )  # fmt: skip
    row = norms_row(engine)
    num_bytes = 16 * len(linear_layers(model)) * 501
    assert row is not None and row[1] == f"at most {bytes_text(num_bytes)} of this rank's memory, besides a budget"
    engine.come_again = False
    assert norms_row(engine) is None


def test_nothing_lies_on_a_disk_where_none_is_to_be_used() -> None:
    """What has no room in memory is refused, and its inputs of layers do not go to the run's folder."""
    skeleton = build_skeleton("125m", 256, 256)
    config = TrainConfig(model="125m", workers=1, micro_batch=8, slices=2, store="none", memory="2gb")
    residency, setup = resolved(Run.of(config), skeleton)
    assert residency.activations == "recompute" and not residency.needs_store and residency.store is None
    with pytest.raises(ConfigError, match="below the floor of"):
        Floor.of(residency, setup).check(residency.memory_bytes)


def folder_of(path: Path, **more: Any) -> Path:
    """A model of transformers with weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, **more,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_a_folder_of_transformers_is_never_whole_where_its_weights_lie_on_the_disk(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "model")
    config = TrainConfig(
        model=f"hf:{path}", micro_batch=1, memory="2gb", store="/var/tmp", seq_len=32,
        tables={"residency": {"weights": "disk"}},
    )  # fmt: skip
    run, skeleton = Run.of(config), build_skeleton(config.model, 256, 32)
    residency, setup = resolved(run, skeleton)
    assert setup.kept is not None and not setup.is_built_whole and not Floor.of(residency, setup).start
    made = built(run, 256, {}, Device())
    whole = build_hf(str(path), 256, 32, 0, {})
    assert all(map(is_hollow, made.model.parameters())) and made.initial is not None and not made.why_whole
    assert all(torch.equal(made.initial(name), param) for name, param in whole.named_parameters())
    for file in path.glob("*.safetensors"):
        file.unlink()
    _, setup = resolved(run, skeleton)
    assert setup.is_built_whole and Floor.of(residency, setup).start > setup.model_bytes
    made = built(run, 256, {}, Device())
    assert made.why_whole == "transformers draws the first weights of a model all at once"
    mixture = TrainConfig(model="moe-tiny", micro_batch=1, memory="2gb", tables={"residency": {"weights": "disk"}})
    made = built(Run.of(mixture), 256, {}, Device())
    assert made.is_uncounted
    assert "mixture" in made.why_whole and not any(map(is_hollow, made.model.parameters()))
    with pytest.raises(ConfigError, match="the model is built whole at first"):
        many = torch.nn.Sequential(*(torch.nn.Linear(1 << 12, 1 << 12, device="meta") for _ in range(40)))
        away = replace(residency, gradients="disk")
        Floor.of(away, replace(setup, model=many, micro_batches=1)).check(10**9)
    problems = Problems()
    words = ["--model", f"hf:{path}", "--memory", "500mb", "--seq-len", "32", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match=r"activations .*; nearest: --memory"):
        plan(read_config(words, problems), problems)


def trained_cut(rank: int, world_size: int, config: TrainConfig) -> list[Any]:
    """Losses of a run whose weights are cut over ranks; the most bytes of them that were whole at a time, and all.

    In memory; in memory, under a budget; and on disks.
    """
    replicas.SMALL_NUMEL = 0
    run_residency.process_memory = cache(lambda: USUAL)
    set_whole, told = passing.set_whole, list[Any]()
    ways: list[dict[str, Any]] = [{}, {"memory": "8gb", "weights": "memory"}, {"weights": "disk"}]
    for number, way in enumerate(ways):
        whole, most = dict[FlatBucket, int](), [0]

        def counted(bucket: FlatBucket, is_whole: bool, whole: Any = whole, most: Any = most) -> None:
            set_whole(bucket, is_whole)
            whole[bucket] = bucket.live.nbytes * is_whole
            most.append(sum(whole.values()))

        passing.set_whole = counted
        tables = {**config.tables, **({"residency": way} if way else {})}
        run_dir = RunDir(Path(config.run_dir) / str(number))
        run_dir.path.mkdir(parents=True, exist_ok=True)
        trainer = trainer_of(replace(config, run_dir=str(run_dir.path), tables=tables), rank, world_size)
        trainer.run()
        losses = []
        if trainer.reporter is not None:
            losses = [record.loss for record in trainer.reporter.metrics.records]
            losses.append(json.loads(run_dir.summary.read_text())["heldout_loss"])
            trainer.reporter.close()
        told.append((losses, max(most), sum(bucket.live.nbytes for bucket in whole)))
    return told


def test_weights_that_are_cut_stay_cut_to_the_end_of_a_run_on_a_disk_or_under_a_budget(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, tokens_per_step=64, workers=2, steps=2, sample_tokens=3, checkpoint_every=0, strategy="frontier",
        tables={"frontier": {"weights_over": 2, "gradients_over": 2}},
    )  # fmt: skip
    for told in run_workers(trained_cut, 2, config):
        (plain, most, whole), *others = told
        assert most == whole
        for losses, held, _ in others:
            assert losses == plain and held < 0.8 * whole


@pytest.mark.parametrize(("model", "workers"), [("tiny", 2), ("125m", 4)])
def test_the_least_budget_is_the_smallest_that_is_taken(model: str, workers: int) -> None:
    """Sub-groups of a small model do not grow with the budget, those of a large one do."""
    skeleton = build_skeleton(model, 256, 256)
    config = TrainConfig(model=model, workers=workers, local_size=1, micro_batch=1, store="/var/tmp")

    def refused(memory: str) -> str:
        residency, setup = resolved(Run.of(replace(config, memory=memory)), skeleton)
        try:
            Floor.of(residency, setup).check(residency.memory_bytes)
        except ConfigError as error:
            return str(error)
        return ""

    assert "memory of 1 B is below" in refused("1b")
    words = refused("500mb")
    least = int(words.split("nearest: --memory ")[1].split("mb")[0])
    assert not refused(f"{least}mb")
    below = refused(f"{least - 1}mb")
    assert f"memory of {least - 1} MB is below the floor of {least} MB" in below and f"--memory {least}mb" in below
