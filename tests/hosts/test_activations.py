"""What a forward is said to keep is what a real one keeps, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from thinwire.hosts.offload.activations import kept_by, kept_bytes, recompute
from thinwire.losses import cut_loss
from thinwire.models.llama import PRESETS, Llama


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("loss", "recomputes", "ties"), [("plain", False, False), ("cut", True, True)])
def test_what_is_kept_is_known_before(dtype: str, loss: str, recomputes: bool, ties: bool) -> None:
    # Short sequences take another attention, which keeps its weights.
    for seq_len in (40, 520):
        config = replace(PRESETS["tiny"], num_hidden_layers=3, vocab_size=600, tie_word_embeddings=ties)
        model, tokens = Llama(config), torch.zeros(2, seq_len, dtype=torch.int64)
        if loss == "cut":
            cut_loss(model, model.lm_head)
        if recomputes:
            recompute(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            kept = kept_bytes(model, tokens, tokens)
        assert kept == kept_by(config, loss, 2, seq_len, dtype, recomputes=recomputes)
        assert kept <= kept_by(config, loss, 2, seq_len, recomputes=recomputes)
