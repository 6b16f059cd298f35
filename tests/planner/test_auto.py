"""What `--strategy auto` plans: mixtures too, and for the optimizer of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.planner.machines import FAST, RATES, machine, near
from tests.training.commands import CommandRunner
from thinwire.errors import ConfigError, Problems
from thinwire.models import Llama, build_skeleton
from thinwire.options import EXPERTS
from thinwire.planner.chosen_plan import changes, optimizer_rows, planned
from thinwire.planner.plan import plan
from thinwire.run.config import TrainConfig
from thinwire.run.settings import read_toml

MIXTURE_RATES = RATES | {"mixture-layer 64 fp32": 4e9, "mixture-launch 64 fp32": 1e4}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    made = CommandRunner(tmp_path_factory.mktemp("auto"))
    yield made
    made.close()


def test_a_run_of_a_mixture_measures_plans_and_trains(runner: CommandRunner) -> None:
    printed = runner.ranks(
        "mixture", "--experts.dispatch", "bf16", strategy="auto", model="moe-tiny", optimizer="muon", steps=2,
        local_size=1,
    )  # fmt: skip
    assert "GFLOP/s a rank" in printed and "counted, but AdamW's where ranks share experts" in " ".join(printed.split())
    config = read_toml(runner.folder / "mixture" / "config.toml", Problems())
    told = json.loads((runner.folder / "mixture" / "plan.json").read_text())
    assert config.strategy != "auto" and config.optimizer == "muon" and len(runner.metrics("mixture")) == 2
    # What was stated is kept, or it is said that it has no effect.
    is_spread = "--experts.parallel 2" in told["flags"]
    assert config.tables.get(EXPERTS, {}).get("dispatch") == ("bf16" if is_spread else None)
    assert is_spread or "--experts.dispatch" in printed


def test_a_run_plans_under_a_budget_and_trains_under_it(runner: CommandRunner) -> None:
    printed = runner.ranks("budget", strategy="auto", memory="2gb", slices=2, steps=2, local_size=1)
    config = read_toml(runner.folder / "budget" / "config.toml", Problems())
    assert config.strategy in ("zero", "zero-bf16", "sdp4bit") and config.stages is None
    assert (config.memory, config.slices, len(runner.metrics("budget"))) == ("2gb", 2, 2)
    said = " ".join(printed.split())
    # The disk was measured, and what is stated explains what is left out.
    assert "MB/s written and" in said and "--slices 2" in said and "without ddp, ddp-bf16" in said
    assert "enforced by the kernel" in said and "the plan predicted " in said
    # It says what it does, and what it has chosen before what follows from that.
    assert said.index("measuring") < said.index("--strategy auto: planning ...") < said.index("objective")
    assert said.index("objective") < said.index("--loss auto") and said.count("logits of a micro-batch") == 1
    assert f"logits of a micro-batch, {config.micro_batch * config.seq_len} x" in said and config.loss == "plain"


def test_a_mixtures_experts_go_where_the_plan_says() -> None:
    model = build_skeleton("moe-tiny", 257, 256)
    assert isinstance(model, Llama)
    made = replace(near(FAST), rates=MIXTURE_RATES)
    asked = TrainConfig(model="moe-tiny", strategy="auto", workers=4, local_size=2, optimizer="adamw", micro_batch=2)
    for ranks in (2, 1):
        config = replace(asked, tables={EXPERTS: {"parallel": ranks, "chunks": 1}})
        found = planned(config, model, made, "fp32")
        assert {way.candidate.experts for way in found.search.fastest} == {ranks}
        table = changes(config, found)["tables"][EXPERTS]
        assert table["parallel"] == ranks and table["chunks"] == 1
        # What travels is chosen with it.
        assert ("move" in table) == (ranks > 1)


def test_memory_and_meshes_are_those_of_the_optimizer() -> None:
    def held(optimizer: str) -> tuple[float, set[int]]:
        found = plan(
            "tiny", near(FAST), tokens_per_step=2048, micro_batch=2, strategies=["ddp"], stages=1,
            axes=("tensor",), optimizer=optimizer,
        )  # fmt: skip
        ways = [way for way in found.search.fastest if way.candidate.sharing == 4]
        return min(way.memory_bytes for way in ways), {way.candidate.tensor for way in found.search.fastest}

    adamw, tensors = held("adamw")
    muon, _ = held("muon")
    parameters = sum(param.numel() for param in build_skeleton("tiny", 257, 256).parameters())
    assert tensors == {1, 2}
    # One moment of matrices in place of two; SCRATCH bytes for each.
    assert adamw - 1.5 * 4 * parameters < muon < adamw - 1.5 * 2 * parameters
    # It keeps projections of whole matrices, which no tensor axis may cut.
    assert held("apollo")[1] == {1}
    with pytest.raises(ConfigError, match="--optimizer lans: none of sdp4bit takes it; nearest: adamw"):
        plan("tiny", machine(FAST), tokens_per_step=2048, strategies=["sdp4bit"], optimizer="lans")
    (row,) = optimizer_rows(TrainConfig(optimizer="sgd"))
    assert row[:2] == ("--optimizer sgd", "its state is counted as AdamW's")
    assert not optimizer_rows(TrainConfig(optimizer="adamw")) and not optimizer_rows(TrainConfig())
