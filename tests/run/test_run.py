"""A run is a configuration and its strategy, which every process builds once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.workers import run_workers
from thinwire import DDP, SDP4Bit
from thinwire.errors import ConfigError
from thinwire.methods.islands.diloco import DiLoCo
from thinwire.run.config import TrainConfig, with_derived
from thinwire.run.place import ProcessPlace
from thinwire.run.run import Run
from thinwire.run.run_dir import RunDir
from thinwire.run.signals import StopFlag
from thinwire.training.trainer import Trainer


def train(rank: int, world_size: int, config: TrainConfig) -> int:
    """One step as a worker takes it; how often the strategy was built."""
    num_built, check = 0, SDP4Bit.__post_init__

    def counting(self: SDP4Bit) -> None:
        nonlocal num_built
        num_built += 1
        check(self)

    SDP4Bit.__post_init__ = counting  # type: ignore[method-assign]
    try:
        run = Run.of(config)
        run = replace(run, config=with_derived(run.config)).with_island_size()
        trainer = Trainer(run, ProcessPlace(rank, rank, world_size), StopFlag(), "fp32", [])
        trainer.run()
    finally:
        SDP4Bit.__post_init__ = check  # type: ignore[method-assign]
    if trainer.reporter is not None:
        trainer.reporter.close()
    return num_built


def test_a_worker_builds_the_strategy_once(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("some words to learn\n" * 200)
    config = TrainConfig(
        model="tiny", data=str(tmp_path / "data.txt"), cache_dir=str(tmp_path / "cache"), run_dir=str(tmp_path / "run"),
        seq_len=16, micro_batch=2, workers=1, steps=1, eval_sequences=0, sample_tokens=0, dtype="fp32",
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    assert run_workers(train, 1, config) == [1]


@pytest.mark.parametrize("stated", [{"store": ""}, {"store": "", "memory": "1gb"}, {"memory": ""}])
def test_an_empty_text_is_not_taken_for_nothing(stated: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^--(store|memory) ''"):
        Run.of(TrainConfig(**stated))  # type: ignore[arg-type]


def test_islands_have_their_inner_strategy_and_size() -> None:
    config = TrainConfig(strategy="diloco", workers=4, tables={"diloco": {"sync_every": 7}, "ddp": {"codec": "bf16"}})
    run = Run.of(config)
    assert run.strategy == DiLoCo(inner=DDP(codec="bf16"), sync_every=7) and run.has_islands
    assert run.used_tables == {"llama", "diloco", "ddp"}
    resolved = run.with_island_size()
    assert (resolved.config.local_size, resolved.config.inner) == (1, "ddp") and resolved.strategy is run.strategy
    with pytest.raises(ConfigError, match="--inner dpd: no such strategy; did you mean 'ddp'"):
        Run.of(replace(config, inner="dpd"))


@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_that_reads_the_configuration_while_another_writes_it_finds_it_whole(tmp_path: Path, node: int) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.claim(node, "steps = 3\n", overwrite=False)
    with run_dir.config(node).open() as file:
        run_dir.write_config(node, "steps = 4\n")
        assert file.read() == "steps = 3\n"
    assert run_dir.config(node).read_text() == "steps = 4\n"
    assert sorted(path.name for path in run_dir.path.iterdir()) == sorted([run_dir.config(node).name, "logs"])
