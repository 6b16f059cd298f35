"""What a forward is said to keep is what a real one keeps, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.hosts.offload import spill
from thinwire.hosts.offload.activations import in_slices, kept_bytes, recompute
from thinwire.hosts.offload.counted import CountedBatch, kept_of
from thinwire.hosts.offload.sampling import RowSampler
from thinwire.hosts.offload.storages import StorageFollower
from thinwire.hosts.offload.tiling import tile
from thinwire.layout.layers import layers_of
from thinwire.losses import cut_loss
from thinwire.models.build import build_skeleton
from thinwire.models.hf import build_hf, skeleton_hf
from thinwire.models.llama import PRESETS, Llama
from thinwire.models.moe import MIXTURES, MoE, MoELlama
from thinwire.tiers import Pace, TierMeter


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("loss", "recomputes", "ties", "tiles"),
    [("plain", False, False, None), ("cut", True, True, None), ("cut", False, False, "lm_head=1x4")],
)
def test_what_is_kept_is_known_before(dtype: str, loss: str, recomputes: bool, ties: bool, tiles: str | None) -> None:
    # Short sequences take another attention, which keeps its weights.
    for seq_len in (40, 520):
        config = replace(PRESETS["tiny"], num_hidden_layers=3, vocab_size=600, tie_word_embeddings=ties)
        model, tokens = Llama(config), torch.zeros(2, seq_len, dtype=torch.int64)
        if loss == "cut":
            cut_loss(model, model.lm_head)
        if tiles is not None:
            tile(model, tiles)
        if recomputes:
            recompute(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            kept = kept_bytes(model, tokens, tokens)
        counted = CountedBatch(config, loss, 2, seq_len, dtype, tile=tiles, recomputes=recomputes).step_bytes()
        assert kept == counted.kept


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("family", "loss", "recomputes"), [("Qwen2", "plain", False), ("GPT2", "cut", True)])
def test_what_a_model_of_transformers_keeps_is_known_too(
    family: str, loss: str, recomputes: bool, dtype: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=300, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=128,
        **({"num_key_value_heads": 2, "intermediate_size": 192} if family == "Qwen2" else {}),
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model, tokens = build_hf(str(tmp_path), 300, 64, 0, {}).train(), torch.zeros(2, 64, dtype=torch.int64)
    skeleton = skeleton_hf(str(tmp_path), 300, 64, {})
    if loss == "cut":
        cut_loss(model)
    if recomputes:
        recompute(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        kept = kept_bytes(model, tokens, tokens)
    found = kept_of(skeleton, loss, 2, 64, dtype)
    # Tensors without values get a mask that real ones need not have, and a copy of keys and values for each head.
    assert found is not None and 1 <= found["inputs" if recomputes else "saved"] / kept < 1.1
    assert len(layers_of(skeleton)) == 3


@pytest.mark.parametrize(("recomputes", "sampled"), [(False, None), (False, 0.3), (True, None)])
def test_the_most_that_a_step_takes_is_known_before(recomputes: bool, sampled: float | None) -> None:
    """With 16,384 words: the loss's backward has twice the logits in memory beside those that the forward keeps."""
    config, tokens = replace(PRESETS["tiny"], num_hidden_layers=4, vocab_size=1 << 14), torch.zeros(2, 64).long()
    model = Llama(config)
    if recomputes:
        recompute(model)
    if sampled is not None:
        RowSampler(model, sampled)
    params = [*model.parameters()]
    with StorageFollower(*params, *model.buffers(), tokens) as follower:
        model(tokens, tokens).backward()
    found = CountedBatch(config, "plain", 2, 64, "fp32", recomputes=recomputes, sampled=sampled).step_bytes()
    peak, logits = follower.peak_bytes([param.grad for param in params if param.grad is not None]), 4 * 128 << 14
    assert found.peak_bytes() == pytest.approx(peak, abs=64) and found.passing == pytest.approx(2 * logits, rel=1e-3)
    # The logits are in memory as a whole, however few layers' activations are.
    assert found.peak_bytes(1) >= 2.99 * logits


def test_a_step_of_a_llama_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CountedBatch(replace(PRESETS["tiny"], vocab_size=77), "plain", 1, 16, "fp32")
    found = plain.step_bytes()
    assert replace(plain, batch=2).step_bytes().kept > found.kept
    monkeypatch.setattr(CountedBatch, "_stepped", None)
    assert replace(plain).step_bytes() == found


def test_what_nobody_can_know_before_is_not_known() -> None:
    assert kept_of(build_skeleton("moe-tiny", 256, 32), "plain", 1, 32) is None


def test_slices_of_a_batch_give_what_the_batch_gives() -> None:
    whole, sliced = (Llama(replace(PRESETS["tiny"], vocab_size=64)).double() for _ in range(2))
    recompute(sliced, 3)
    tokens = torch.randint(0, 64, (5, 12), generator=torch.Generator().manual_seed(0))
    losses = [model(tokens, tokens) for model in (whole, sliced)]
    for loss in losses:
        loss.backward()
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-12)
    for one, other in zip(whole.parameters(), sliced.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)
    with pytest.raises(ConfigError, match="slices beside documents"):
        sliced(tokens, tokens, documents=torch.zeros_like(tokens))


def test_slices_of_a_mixture_are_balanced_as_one_batch() -> None:
    config = replace(MIXTURES["moe-tiny"], vocab_size=64, num_hidden_layers=2, router_aux_loss_coef=1.0)
    whole, sliced = (MoELlama(config).double() for _ in range(2))
    recompute(sliced, 3)
    tokens = torch.randint(0, 64, (5, 12), generator=torch.Generator().manual_seed(0))
    whole(tokens, tokens).backward()
    loss = sliced(tokens, tokens)
    mixtures = [each for each in sliced.modules() if isinstance(each, MoE)]
    noted = [each.sums for each in mixtures]
    loss.backward()
    for one, other in zip(whole.parameters(), sliced.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)
    load = sliced.row_counts.take()
    assert whole.row_counts.take() == load and load.asked == 2 * 2 * tokens.numel()
    # What is computed again replaces nothing that lives until the next step.
    assert all(each.sums is sums for each, sums in zip(mixtures, noted, strict=True))
    sliced.capacity_factor = 1.5
    with pytest.raises(ConfigError, match=r"slices beside capacity_factor 1.5"):
        sliced(tokens, tokens)


def test_slices_cut_what_belongs_to_sequences_and_nothing_else() -> None:
    """A table whose length is that of the batch stays whole; positions, masks and tuples are cut."""
    seen = []

    def layer(x: torch.Tensor, table: torch.Tensor, **given: Any) -> tuple[torch.Tensor, None]:
        seen.append([len(x), len(table), len(given["positions"]), len(given["pair"][0])])
        return x + given["positions"].unsqueeze(-1) + given["pair"][0], None

    x, table = torch.randn(4, 4, 2), torch.randn(4, 2)
    positions, pair = torch.arange(16).view(4, 4), (torch.randn(4, 4, 2), "word")
    found, nothing = in_slices(layer, 3, x, table, positions=positions, pair=pair)
    assert torch.equal(found, x + positions.unsqueeze(-1) + pair[0]) and nothing is None
    assert seen == [[2, 4, 2, 2], [1, 4, 1, 1], [1, 4, 1, 1]]


def test_activations_on_a_disk_are_written_once_and_their_places_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "SMALL_BYTES", 0)
    config = replace(PRESETS["tiny"], vocab_size=64)
    plain, away = Llama(config), Llama(config)
    meter = TierMeter()
    disk = spill.ActivationsOnDisk(away, tmp_path, meter, Pace(None))
    tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    ends = []
    for _ in range(2):
        losses = [model(tokens, tokens) for model in (plain, away)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        for one, other in zip(plain.parameters(), away.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
        ends.append(disk._end)
        del losses, loss
    moved = meter.snapshot()
    assert ends[0] == ends[1] and moved.written_bytes == 2 * ends[0] and moved.read_bytes > moved.written_bytes
    disk.close()
