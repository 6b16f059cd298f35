"""Losses that balance the experts of a mixture, from sums over tokens, which ranks can add."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Of the function in each file of transformers that takes the balance loss of all layers at once.
JOINING = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def gshard_loss(sums: Tensor) -> Tensor:
    """E * sum_e mean(score_e) * (share of tokens whose first choice is e); 1 for an even router, at most E.

    Shape:
        sums: [..., 4, experts], see Choice; over all tokens of the batch. result: [...].
    Source: Lepikhin et al., "GShard" (2020), algorithm 1.
    """
    scores, first = sums[..., 0, :], sums[..., 1, :]
    num_tokens = first.sum(-1, keepdim=True)
    return scores.shape[-1] * (scores / num_tokens * (first / num_tokens)).sum(-1)


def importance_load_loss(sums: Tensor) -> Tensor:
    """(CV(importance)^2 + CV(load)^2) / 2, the squared coefficients of variation over experts; shapes as gshard_loss.

    Source: Shazeer et al., "Outrageously large neural networks" (2017), section 4.
    """
    scores, load = sums[..., 0, :], sums[..., 2, :]
    parts = [part.var(-1, correction=0) / part.mean(-1).square() for part in (scores, load)]
    return (parts[0] + parts[1]) / 2


def summed_over_ranks(sums: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum of all ranks' `sums`. The mean over ranks of the gradients from its backward is the gradient of the sum.

    gather: returns a tensor of all ranks, [ranks, ...].
    """
    every = gather(sums.detach())
    return every.sum(0) + len(every) * (sums - sums.detach())


def balance_of(model: nn.Module) -> Any:
    """The function by which a causal model of transformers takes its balance loss; None: it takes none."""
    return getattr(sys.modules.get(type(model).__module__), "load_balancing_loss_func", None)


def joins_layers(model: nn.Module) -> bool:
    """Whether a causal model of transformers has the balance loss of `joined_loss`, as all but a few have."""
    loss = balance_of(model)
    has_sizes = all(isinstance(getattr(model, name, None), int) for name in ("num_experts", "num_experts_per_tok"))
    return loss is not None and has_sizes and list(inspect.signature(loss).parameters) == JOINING


def joined_sums(model: Any, logits: Sequence[Tensor]) -> Tensor:
    """The sums over tokens and layers of scores, and of choices, [2, experts], for `joined_loss`.

    logits: of the model's routers, [tokens, experts] each.
    """
    weights = [each.softmax(-1) for each in logits]
    wide = torch.promote_types(weights[0].dtype, torch.float32)
    scores = torch.stack([each.to(wide).sum(0) for each in weights]).sum(0)
    chosen = torch.cat([each.topk(model.num_experts_per_tok, -1).indices.flatten() for each in weights])
    return torch.stack([scores, torch.bincount(chosen, minlength=model.num_experts).to(wide)])


def joined_loss(sums: Tensor, top_k: int) -> Tensor:
    """E * sum_e mean(score_e) * (choices of e per token), over the tokens of all layers at once; a scalar.

    sums: see `joined_sums`. top_k: experts of a token. transformers takes it so. Source: Fedus et al., "Switch
    transformers" (2021), equations 4 to 6.
    """
    scores, chosen = sums
    num_rows = chosen.sum() / top_k
    return len(scores) * (scores / num_rows * (chosen / num_rows)).sum()
