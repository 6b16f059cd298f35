"""A student's experts learn from those of its teacher, by the loss as it is written out."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.pruning.test_prune import mixtral_folder, small, text
from tests.training.alone import small_config, trainer_of
from tests.training.commands import check_refused, train_ranks
from tests.workers import run_workers
from thinwire import cli
from thinwire.checkpoint.folder import latest
from thinwire.checkpoint.source import read_weights
from thinwire.checkpoint.weights_folder import write_weights
from thinwire.errors import ConfigError
from thinwire.models import MoELlama
from thinwire.models.distil import Distillation
from thinwire.models.kept import MASKS
from thinwire.models.moe import MoE, mixtral_weights


def written_out(student: MoELlama, teacher: MoELlama, tokens: torch.Tensor) -> torch.Tensor:
    """The sum over layers and experts of the mean squared error, expert by expert."""
    inputs: list[torch.Tensor] = []
    layers = [module for module in teacher.modules() if isinstance(module, MoE)]
    hooks = [module.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for module in layers]
    with torch.no_grad():
        teacher(tokens)
    for hook in hooks:
        hook.remove()
    total = torch.zeros((), dtype=torch.float64)
    for theirs, ours, x in zip(layers, (m for m in student.modules() if isinstance(m, MoE)), inputs, strict=True):
        flat = x.flatten(0, 1)
        index = theirs.gate(flat).index
        for expert in range(index.max() + 1):
            rows = flat[(index == expert).any(1)]
            results = []
            for each in (theirs.experts, ours.experts):
                gate, up = (rows @ weight[expert].t() for weight in (each.gate_proj, each.up_proj))
                results.append((F.silu(gate) * up) @ each.down_proj[expert])
            total = total + (F.mse_loss(results[0], results[1]) if len(rows) else 0)
    return total


def test_loss_and_gradient_are_those_that_are_written_out() -> None:
    teacher, student, plain = (small(router_aux_loss_coef=0.0).double() for _ in range(3))
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one, other in zip(student.parameters(), plain.parameters(), strict=True):
            one.add_(0.05 * torch.randn(one.shape, generator=draws, dtype=torch.float64))
            other.copy_(one)
    (tokens,) = text(rows=3)
    distillation = Distillation(student, teacher, 0.7)
    loss = student(tokens, tokens)
    loss.backward()
    errors = written_out(plain, teacher, tokens)
    expected = plain(tokens, tokens)
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    (expected + 0.7 * errors).backward()
    for (name, one), other in zip(student.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-14, msg=name)
    assert [float(part) for part in distillation.parts(tokens, tokens)] == pytest.approx(
        [float(expected), float(errors)]
    )
    assert all(param.grad is None for param in teacher.parameters())


def test_models_that_are_not_alike_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"2 layer\(s\) of experts \(4, 16\) .* teacher 2 layer\(s\) of experts \(8, 16\)"
    ):
        Distillation(small(), small(num_local_experts=8))


def first_step(rank: int, world_size: int, folder: str) -> tuple[float, list[float], float]:
    """The agreed weight, the sums of this rank's losses in the first step, and the loss that is displayed."""
    config = small_config(
        Path(folder), workers=world_size, local_size=1, strategy="zero", steps=2, sample_tokens=0,
        tokens_per_step=2 * 2 * 16 * world_size, teacher=f"hf:{folder}/dense",
    )  # fmt: skip
    trainer = trainer_of(replace(config, model=f"hf:{folder}/student"), rank, world_size)
    engine = trainer.engine
    assert engine.distillation is not None and engine.distillation.weight is not None
    engine.optimizer.synchronize()
    with engine._next_batches() as batches:
        parts = [engine.distillation.parts(*batch) for batch in batches]
    assert len(parts) == 2
    trainer._take_step()
    found = engine.distillation.weight, [float(sum(part)) for part in zip(*parts, strict=True)]
    loss = trainer.optimizer.mean_loss
    engine.close()
    return *found, loss


def test_the_weight_is_the_ratio_of_both_losses_of_all_ranks_in_the_first_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ours = mixtral_folder(tmp_path)
    shutil.copytree(tmp_path / "dense", tmp_path / "student")
    for param in ours.parameters():
        param.data.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())))
    write_weights(tmp_path / "student", mixtral_weights(ours.state_dict()).items())
    small_config(tmp_path)
    found = run_workers(first_step, 2, str(tmp_path))
    text_loss, errors = (sum(parts[kind] for _, parts, _ in found) for kind in (0, 1))
    # Ranks differ, and so does each one's own ratio.
    assert found[0][1][0] / found[0][1][1] != pytest.approx(text_loss / errors, rel=1e-4)
    for weight, _, loss in found:
        assert weight == pytest.approx(text_loss / errors, rel=1e-6)
        # The displayed loss is that of the text: of two micro-batches on two ranks.
        assert loss == pytest.approx(text_loss / 4, rel=1e-6)


def test_a_pruned_folder_learns_from_the_one_it_was_pruned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HOME", str(tmp_path))
    mixtral_folder(tmp_path)
    flags = ["--data", str(tmp_path / "text.txt"), "--samples", "8", "--out", str(tmp_path / "sparse")]
    assert cli.run(["prune", f"hf:{tmp_path / 'dense'}", *flags]) == 0
    folder = tmp_path / "refused"
    folder.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    for teacher, near in (("run", "thinwire export {} --to hf DIR, and then"), ("dense", "--teacher hf:{}$")):
        words = f"must be hf:DIR, a folder of a mixture of experts; nearest: {near.format(tmp_path / teacher)}"
        check_refused(folder, ["--model", "tiny", "--teacher", str(tmp_path / teacher)], words, monkeypatch)
    flags = ["--model", "tiny", "--seq-len", "16", "--teacher", f"hf:{tmp_path / 'dense'}", "--compile"]
    check_refused(folder, flags, r"(?s)the model has 0 layer\(s\) of experts .* --teacher with --compile", monkeypatch)
    for stated, near in (
        ("--experts.parallel 4", "--experts.parallel 1"),
        ("--mesh data=2,expert=2", "--mesh data=4"),
        ("--stages auto", "--stages 1"),
    ):
        flags = ["--teacher", f"hf:{tmp_path / 'dense'}", "--model", f"hf:{tmp_path / 'sparse'}", "--workers", "4"]
        check_refused(folder, [*flags, *stated.split()], rf"nearest: {near}, or leave --teacher out", monkeypatch)
    taught = (
        "--seq-len 16 --micro-batch 2 --tokens-per-step 64 --lr 0.003 --dtype fp32 --eval-sequences 0 "
        f"--sample-tokens 0 --local-size 1 --steps 4 --strategy sdp4bit --model hf:{tmp_path / 'sparse'} "
        f"--teacher hf:{tmp_path / 'dense'}"
    ).split()
    runs = {
        "whole": train_ranks(tmp_path, "whole", 2, taught),
        "part": train_ranks(tmp_path, "part", 2, [*taught, "--stop-at", "2"]),
    }
    runs["on"] = train_ranks(tmp_path, "on", 2, ["--steps", "4"], "part")
    losses = {name: [line["loss"] for line in run["steps"].values()] for name, run in runs.items()}
    assert losses["on"] == losses["whole"]
    first, *others = runs["whole"]["steps"].values()
    assert first["teacher_loss"] == pytest.approx(first["loss"], rel=1e-4)
    assert all(0 < each["teacher_loss"] != first["teacher_loss"] for each in others)
    told = tomllib.loads((runs["whole"]["folder"] / "config.toml").read_text())
    assert "its experts teach, weight " in runs["whole"]["printed"]
    # Both weigh the same before the first step, and what was found is kept.
    assert told["teacher_weight"] > 0
    assert told["teacher_weight"] == tomllib.loads((runs["on"]["folder"] / "config.toml").read_text())["teacher_weight"]
    assert (tmp_path / "sparse" / MASKS).is_file()
    checkpoint = latest(runs["whole"]["folder"] / "checkpoints")
    assert checkpoint is not None
    kept = {name: value for name, value in read_weights(checkpoint) if "parametrizations" in name}
    assert len(kept) == 12
