"""`--model hf:DIR --experts.parallel`: experts of transformers over ranks, as in one process, and from checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.training.commands import check_refused, train_ranks
from thinwire.checkpoint.folder import latest
from thinwire.checkpoint.source import read_weights
from thinwire.models.kept import MASKS, KeptValues
from thinwire.pruning.masks import mask_of

transformers = pytest.importorskip("transformers")
STEPS, SAVED = 5, 3
SMALL = (
    "--seq-len", "16", "--micro-batch", "2", "--tokens-per-step", "64", "--lr", "0.003", "--dtype", "fp32",
    "--eval-sequences", "4", "--sample-tokens", "4", "--timeout", "60", "--local-size", "1", "--strategy", "zero",
    "--steps", str(STEPS),
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen3-moe")
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=32, router_aux_loss_coef=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return f"hf:{folder}"


def test_they_train_as_one_process_and_move_to_other_ranks(model: str, tmp_path: Path) -> None:
    rows = [
        ("alone", 1, "", ""),
        ("two", 2, f"--experts.parallel 2 --experts.move auto --experts.chunks auto --stop-at {SAVED}", ""),
        ("one", 1, "--experts.parallel 1", "two"),
    ]
    alone, two, one = (
        train_ranks(tmp_path, name, ranks, ["--model", model, *SMALL, *flags.split()], origin)
        for name, ranks, flags, origin in rows
    )
    losses = [line["loss"] for line in alone["steps"].values()]
    assert [line["loss"] for line in two["steps"].values()] == pytest.approx(losses[:SAVED], rel=1e-5)
    assert [line["loss"] for line in one["steps"].values()] == pytest.approx(losses, rel=1e-5)
    assert one["heldout_loss"] == pytest.approx(alone["heldout_loss"], rel=1e-5)
    assert "2 of 4 experts a rank" in two["printed"] and "resume proven" in one["printed"]
    assert "a simulated layer, forward and backward: " in two["printed"]
    assert all(line["experts_s"] > 0 and line["predicted_experts_s"] > 0 for line in two["steps"].values())


def test_what_is_kept_of_pruned_ones_trains_on_ranks_and_goes_on_on_one(model: str, tmp_path: Path) -> None:
    pruned = transformers.AutoModelForCausalLM.from_pretrained(model.removeprefix("hf:"))
    packed = {name: param.data for name, param in pruned.named_parameters() if ".experts." in name}
    masks = {name: mask_of(weight.abs(), "rows", 0.5) for name, weight in packed.items()}
    for name, weight in packed.items():
        weight.mul_(masks[name])
    pruned.save_pretrained(tmp_path / "pruned")
    save_file(masks, tmp_path / "pruned" / MASKS)
    flags = ["--model", f"hf:{tmp_path / 'pruned'}", *SMALL, "--strategy", "sdp4bit"]
    two = train_ranks(tmp_path, "two", 2, [*flags, "--experts.parallel", "2", "--stop-at", str(SAVED)])
    one = train_ranks(tmp_path, "one", 1, [*flags, "--experts.parallel", "1"], "two")
    assert "2 of 4 experts a rank" in two["printed"] and "resume proven" in one["printed"]
    checkpoint = latest(one["folder"] / "checkpoints")
    assert checkpoint is not None
    for name, values in read_weights(checkpoint):
        place, _, kept = name.removeprefix("model.").partition("parametrizations.")
        if kept:
            short = place + kept.removesuffix(".original")
            weight = KeptValues(masks[short])(values)
            assert torch.equal(weight == 0, ~masks.pop(short)) and not torch.equal(weight, packed[short])
    assert not masks


def test_slices_of_them_are_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--model", model, "--workers", "2", "--experts.parallel", "2", "--experts.slices", "2", "--seq-len", "32"]
    check_refused(tmp_path, flags, "its experts lie whole on a rank; nearest: --experts.slices 1", monkeypatch)
