"""What a pipeline computes of a sample."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.hosts.pipeline.forward import LastLogits
from thinwire.models import build_model
from thinwire.models.generation import generate


def test_a_sample_has_few_lengths_and_the_same_tokens() -> None:
    """Under a budget: each new length takes memory for the CPU's compiled kernels."""
    model, lengths = build_model("tiny", vocab_size=64, seq_len=16, seed=0), list[int]()

    def forward(tokens: Tensor, *, only: int) -> Tensor:
        lengths.append(tokens.shape[1])
        return model(tokens)[:, only : only + 1]

    prompt = torch.arange(3).view(1, 3)
    expected = generate(model, prompt, 20, temperature=0)
    assert torch.equal(generate(LastLogits(forward, model, 8), prompt, 20, temperature=0), expected)
    assert set(lengths) == {8, 16} and len(lengths) == 20
