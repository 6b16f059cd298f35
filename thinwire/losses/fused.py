"""Gradients of a scalar cross-entropy, computed in the forward: logits of a few tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.losses.blocks import Sums, blocks, logits_of, slope_of, wide

# Tokens of a block: more are faster, and take more memory.
TOKENS = 128


class FusedCrossEntropy(torch.autograd.Function):
    """scale * sum_n (lse_n - logit of target n + z lse_n^2), a scalar in fp32 or fp64.

    The logits of a block yield its part of the loss and of all gradients at once, so nothing is computed twice. The
    largest tensor beside the gradients is [TOKENS, V]. The gradients exist after the forward; the backward only
    multiplies them.

    Shape:
        e: [N, D]. c: [V, D]. bias: [V] or None. targets: int64 [N], each in [0, V).
    """

    @staticmethod
    def forward(
        ctx: Any, e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor, scale: float, softcap: float | None,
        z_loss: float, accumulation: str,
    ) -> Tensor:  # fmt: skip
        wants_e, wants_c, wants_bias, *_ = ctx.needs_input_grad
        total = torch.zeros((), dtype=wide(e.dtype), device=e.device)
        of_e = torch.empty_like(e) if wants_e else None
        sums = Sums(len(c), c.shape[1], c, accumulation) if wants_c else None
        of_bias = torch.zeros(len(c), dtype=total.dtype, device=e.device) if wants_bias else None
        room = torch.empty(min(len(e), TOKENS) * len(c), dtype=total.dtype, device=e.device)
        for rows in blocks(len(e), TOKENS):
            logits, aims = logits_of(e[rows], c, bias, softcap, room), targets[rows, None]
            slope = None if softcap is None else slope_of(logits, softcap)
            peak = logits.amax(1, keepdim=True)
            correct = logits.gather(1, aims)
            weights = logits.sub_(peak).exp_()
            norm = weights.sum(1, keepdim=True)
            lse = norm.log() + peak
            total += (lse - correct + z_loss * lse.square()).sum()
            if not any(ctx.needs_input_grad):
                continue
            grad = weights.mul_((1 + 2 * z_loss * lse).mul_(scale).div_(norm))
            grad.scatter_add_(1, aims, torch.full_like(correct, -scale))
            if slope is not None:
                grad.mul_(slope)
            if of_e is not None:
                torch.mm(grad.to(c.dtype), c, out=of_e[rows])
            if sums is not None:
                sums.add(slice(None), grad.T, e[rows])
            if of_bias is not None:
                of_bias += grad.sum(0)
        of_c = None if sums is None else sums.total()
        ctx.save_for_backward(of_e, of_c, None if of_bias is None or bias is None else of_bias.to(bias.dtype))
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.saved_tensors
        if grads[0] != 1:
            found = [None if each is None else each * grads[0].to(each.dtype) for each in found]
        return *found, *[None] * 5
