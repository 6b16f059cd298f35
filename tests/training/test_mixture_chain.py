"""A mixture from the first step to transformers: ranks, a kill, one process, export, pruning, distillation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training.commands import train_ranks
from tests.workers import WorkerFailed
from thinwire import cli
from thinwire.checkpoint.folder import latest, step_of

SMALL = (
    "--seq-len", "16", "--micro-batch", "1", "--tokens-per-step", "64", "--lr", "0.003", "--dtype", "fp32",
    "--eval-sequences", "4", "--sample-tokens", "0", "--strategy", "sdp4bit",
)  # fmt: skip
MIXTURE = (
    "--model", "moe-tiny", "--moe.num-hidden-layers", "1", "--local-size", "2", "--timeout", "10", "--steps", "8",
    "--checkpoint-every", "2", "--sequence.parallel", "2", "--experts.parallel", "2", "--experts.route", "auto",
    "--experts.dispatch", "int8",
)  # fmt: skip


def test_a_mixture_survives_a_kill_and_all_that_comes_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(WorkerFailed, match="exit codes"):
        train_ranks(tmp_path, "killed", 4, [*SMALL, *MIXTURE, "--inject", "kill rank=2 step=5"])
    told = (tmp_path / "killed.log").read_text()
    assert "--experts.route auto: tokens, " in told and "--sequence.method auto: " in told
    # Rows do travel, and are rounded.
    assert "4 of 8 experts a rank" in told and "experts dispatch int8: int8/64" in told
    assert "rank 2 is missing" in told
    # The last one may not have been whole yet.
    assert step_of(latest(tmp_path / "killed/checkpoints")) in (2, 4)
    resumed = train_ranks(
        tmp_path, "resumed", 1, ["--sequence.parallel", "1", "--experts.parallel", "1", "--local-size", "1"], "killed"
    )
    assert "resume proven" in resumed["printed"] and max(resumed["steps"]) == 8
    dense, sparse, taught, out = (tmp_path / name for name in ("dense", "sparse", "taught", "out"))
    assert cli.run(["export", str(resumed["folder"]), str(dense), "--sequences", "4"]) == 0
    pruning = ["--out", str(sparse), "--samples", "8", "--sequences", "4", "--data", str(tmp_path / "text.txt")]
    assert cli.run(["prune", f"hf:{dense}", *pruning]) == 0
    flags = ["--model", f"hf:{sparse}", "--teacher", f"hf:{dense}", "--steps", "2", "--timeout", "60"]
    learned = train_ranks(tmp_path, taught.name, 2, [*SMALL, *flags, "--local-size", "1"])
    assert "its experts teach, weight " in learned["printed"]
    assert cli.run(["export", str(taught), str(out), "--sequences", "4"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert json.loads((out / "config.json").read_text())["model_type"] == "mixtral"
    down = model.model.layers[0].mlp.experts.down_proj
    assert torch.equal((down == 0).sum(-1), torch.full(down.shape[:2], down.shape[-1] // 2))
