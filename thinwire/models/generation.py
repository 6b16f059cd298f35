from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def generate(
    model: nn.Module,
    tokens: Tensor,
    num_new: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    multiple: int = 1,
) -> Tensor:
    """Extends tokens [batch, seq] by `num_new` tokens drawn from softmax(logits / temperature).

    `model(tokens)` returns logits [batch, seq, vocab]; the context is cropped to its last `model.max_seq_len` tokens.
    Temperature 0 takes the most likely token. Returns int64 [batch, seq + num_new]; train or eval mode is restored.

    multiple: see `padded`.
    """
    return torch.cat((tokens, *generate_tokens(model, tokens, num_new, temperature, generator, multiple)), dim=1)


def padded(tokens: Tensor, multiple: int, most: int) -> Tensor:
    """Tokens [batch, seq] with zeros behind them up to a multiple of so many tokens, or to `most`.

    That changes no logit of a causal model beyond rounding, and the CPU's compiled kernels take memory for each new
    length.
    """
    length = tokens.shape[1]
    return nn.functional.pad(tokens, (0, min(most, -(-length // multiple) * multiple) - length))


def generate_tokens(
    model: nn.Module,
    tokens: Tensor,
    num_new: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    multiple: int = 1,
) -> Iterator[Tensor]:
    """The tokens that `generate` appends, int64 [batch, 1] each, as soon as each is drawn."""
    was_training = model.training
    context: Any = model.max_seq_len
    model.eval()
    try:
        for _ in range(num_new):
            given = tokens[:, -context:]
            longer = padded(given, multiple, context)
            with torch.no_grad():
                logits = model(longer)[:, given.shape[1] - 1 - longer.shape[1]].float()
            if temperature > 0:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = logits.argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, chosen), dim=1)
            yield chosen
    finally:
        model.train(was_training)
