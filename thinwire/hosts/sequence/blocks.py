"""Attention of one block of queries to one block of keys, with what is needed to merge blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire import _compat


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v, and the logarithm of the softmax's sums, fp32 or fp64 [batch, heads, queries].

    Shape:
        q: [batch, heads, queries, d]. k, v: [batch, kv_heads, keys, d].
    """
    if q.device.type == "cpu":
        return _compat.cpu_flash_forward(q, k, v, is_causal, scale)
    return plain_forward(q, k, v, is_causal, scale)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from one block, whose weights are exp(scale q k^T - sums): blocks' gradients add up.

    Shape:
        grad, q, out: [batch, heads, queries, d]; `out` is the result of all blocks, and `grad` its gradient.
        k, v: [batch, kv_heads, keys, d]. sums: of all blocks, [batch, heads, queries].
    """
    if q.device.type == "cpu":
        return _compat.cpu_flash_backward(grad, q, k, v, out, sums, is_causal, scale)
    return plain_backward(grad, q, k, v, out, sums, is_causal, scale)


def plain_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`forward` by products of whole matrices, on any device."""
    scores = scores_of(q, k, is_causal, scale)
    sums = scores.logsumexp(-1)
    weights = (scores - sums[..., None]).exp()
    return (weights @ repeated(v, q).to(weights.dtype)).to(q.dtype), sums


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` by products of whole matrices, on any device, in fp32 or fp64."""
    weights = (scores_of(q, k, is_causal, scale) - sums[..., None]).exp()
    ups = grad.to(weights.dtype)
    inner = ups @ repeated(v, q).to(weights.dtype).transpose(-1, -2)
    down = weights * (inner - (ups * out).sum(-1, keepdim=True)) * scale
    heads = k.shape[1]
    grad_k = down.transpose(-1, -2) @ q.to(weights.dtype)
    grad_v = weights.transpose(-1, -2) @ ups
    return down @ repeated(k, q).to(weights.dtype), summed(grad_k, heads), summed(grad_v, heads)


def scores_of(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    """scale q k^T in fp32 or fp64, -inf where the mask hides a key.

    Shape:
        q: [batch, heads, queries, d]. k: [batch, kv_heads, keys, d]. Returns [batch, heads, queries, keys].
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ repeated(k, q).to(wide).transpose(-1, -2) * scale
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf, dtype=wide, device=q.device).triu(1)
    return scores


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values x, repeated so that each query head has its own.

    Shape:
        x: [batch, kv_heads, keys, d]. q: [batch, heads, queries, d]. Returns [batch, heads, keys, d].
    """
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def summed(x: Tensor, heads: int) -> Tensor:
    """The transpose of `repeated`."""
    return x.unflatten(1, (heads, -1)).sum(2)


def merge(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention to two blocks of keys.

    With s = log(exp(s1) + exp(s2)): out = exp(s1 - s) out1 + exp(s2 - s) out2. Returns out and s.

    Shape:
        out, more: [batch, heads, queries, d]. sums, more_sums: s1, s2 [batch, heads, queries].

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
    """
    both = torch.logaddexp(sums, more_sums)
    return out * (sums - both).exp()[..., None] + more * (more_sums - both).exp()[..., None], both
