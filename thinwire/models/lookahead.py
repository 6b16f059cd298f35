"""Routers that look at all tokens before they choose: for models that are not causal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

EXPERT_CHOICE, SOFT = "expert-choice", "softmoe"
NOT_CAUSAL = (EXPERT_CHOICE, SOFT)


def expert_choice(scores: Tensor, limit: int) -> Tensor:
    """Each expert takes the `limit` tokens of its highest scores; the choices of each token, int64 [tokens, experts].

    Choice e of a token is expert e if that one takes it, and `experts`, none, if not. So all experts have equally many
    rows, and a token has any number of experts. Source: Zhou et al., "Mixture-of-experts with expert choice routing"
    (NeurIPS 2022).

    Shape:
        scores: [tokens, experts].
    """
    num_tokens, num_experts = scores.shape
    taken = torch.zeros_like(scores, dtype=torch.bool)
    taken.scatter_(0, scores.topk(min(limit, num_tokens), dim=0).indices, True)
    return torch.where(taken, torch.arange(num_experts, device=scores.device), num_experts)


class SoftSlots(nn.Module):
    """Slots of experts, each a mixture of a sequence's tokens; a token's output is a mixture of the slots' outputs.

    With logits L = x W^T, slot j of a sequence gets sum_t softmax_t(L)_tj x_t, and token t the sum over slots of
    softmax_j(L)_tj times their outputs. Every token trains every expert, and nothing is dropped. Source: Puigcerver et
    al., "From sparse to soft mixtures of experts" (ICLR 2024), section 2.

    Args:
        num_slots: of each expert, in a sequence.
    """

    def __init__(self, num_experts: int, num_slots: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts * num_slots, width))
        self.num_slots = num_slots

    def mixed(self, x: Tensor, experts: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The layer's output for tokens [batch, tokens, hidden], in their shape. Weights of mixtures are fp32.

        experts: called as Experts.
        """
        with torch.autocast(x.device.type, enabled=False):
            wide = x if x.dtype == torch.float64 else x.float()
            logits = wide @ self.weight.to(wide.dtype).t()
            slots = logits.softmax(1).transpose(1, 2) @ wide
        rows = slots.flatten(0, 1).to(x.dtype)
        each = torch.arange(len(self.weight), device=x.device) // self.num_slots
        made = experts(rows, each.repeat(len(x))[:, None], rows.new_ones(len(rows), 1))
        with torch.autocast(x.device.type, enabled=False):
            return (logits.softmax(2) @ made.view(slots.shape).to(wide.dtype)).to(x.dtype)
