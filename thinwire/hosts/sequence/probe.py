"""Tests, by three passes in one process, whether a model's tokens interact only in its attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.hosts.sequence import blocks
from thinwire.hosts.sequence.seams import is_hugging_face, replace_in_hugging_face

# Tokens of half a sequence. Parts of a logit, by which passes may differ for rounding.
HALF, TOLERANCE = 8, {torch.float64: 1e-7, torch.float32: 1e-4}
COARSE = 0.05


class Earlier:
    """Causal attention that keeps the keys and values of a whole sequence, for a later pass over its second half."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.num_read: int | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, scale: float | None = None, attend: Any = None
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self.num_read is None:
            self.kept.append((k, v))
            return blocks.plain_forward(q, k, v, is_causal, scale)[0]
        keys, values = self.kept[self.num_read]
        self.num_read += 1
        early = blocks.plain_forward(q, keys[:, :, :HALF], values[:, :, :HALF], False, scale)
        return blocks.merge(*early, *blocks.plain_forward(q, k, v, is_causal, scale))[0].to(q.dtype)

    def positions(self, tokens: Tensor) -> Tensor:
        """Positions of this pass's tokens in the sequence."""
        first = 0 if self.num_read is None else HALF
        return torch.arange(first, first + tokens.shape[1], device=tokens.device)


@torch.no_grad()
def check_sharing(model: nn.Module) -> None:
    """Raise ConfigError for a model of transformers that would compute other values if ranks share a sequence.

    The second half of a sequence must get the same logits as in the whole sequence, from keys and values of the first
    half alone. This fails if tokens interact elsewhere, such as in a convolution, or if a bias stands for positions.
    """
    for module in model.modules():
        if is_hugging_face(module):
            modes = [(each, each.training) for each in module.modules()]
            module.eval()
            try:
                _check(module)
            finally:
                for each, mode in modes:
                    each.training = mode


def _check(model: Any) -> None:
    first = next(model.parameters())
    tokens = (1 + 7 * torch.arange(2 * HALF, device=first.device)).remainder(model.config.vocab_size)[None]
    truth = _logits(model, tokens)
    earlier = Earlier()
    undo = replace_in_hugging_face(model, earlier, earlier.positions, lambda tokens: 2 * HALF)
    try:
        whole = _logits(model, tokens)
        if not earlier.kept:
            raise _refusal(model, "its attention is not one that transformers lets others replace")
        if not _is_same(whole, truth):
            raise _refusal(model, "its attention has rules beside the causal mask")
        earlier.num_read = 0
        if not _is_same(_logits(model, tokens[:, HALF:]), truth[:, HALF:]):
            raise _refusal(model, "its tokens meet outside of its attention, or it takes no positions")
    finally:
        undo()


def _logits(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits


def _is_same(found: Tensor, truth: Tensor) -> bool:
    allowed = TOLERANCE.get(truth.dtype, COARSE) * float(truth.abs().max())
    return bool((found - truth).abs().max() <= allowed)


def _refusal(model: Any, why: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} can't be split along its sequences: {why}; nearest: --sequence.parallel 1, or a model "
        "such as Llama"
    )
