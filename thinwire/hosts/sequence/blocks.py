"""Attention of one block of queries to one block of keys, with what is needed to merge blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire import _compat

# Queries whose weights are in memory together, where no kernel keeps them out of it.
TILE = 1024


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
    """`forward` by products, on any device. The weights of TILE queries are in memory at a time."""
    outs, sums = [], []
    for tile, seen in tiles(q, is_causal):
        scores = scores_of(q[:, :, tile], k[:, :, :seen], is_causal, scale)
        sums.append(scores.logsumexp(-1))
        weights = (scores - sums[-1][..., None]).exp()
        outs.append((weights @ repeated(v[:, :, :seen], q).to(weights.dtype)).to(q.dtype))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` by products, on any device, in fp32 or fp64; tile by tile as `plain_forward`."""
    heads, wide = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    grads_q, grad_k, grad_v = [], *(x.new_zeros(x.shape, dtype=wide) for x in (k, v))
    for tile, seen in tiles(q, is_causal):
        keys, own = k[:, :, :seen], q[:, :, tile].to(wide)
        weights = (scores_of(own, keys, is_causal, scale) - sums[:, :, tile, None]).exp()
        ups = grad[:, :, tile].to(wide)
        inner = ups @ repeated(v[:, :, :seen], q).to(wide).transpose(-1, -2)
        down = weights * (inner - (ups * out[:, :, tile]).sum(-1, keepdim=True)) * scale
        grads_q.append(down @ repeated(keys, q).to(wide))
        grad_k[:, :, :seen] += summed(down.transpose(-1, -2) @ own, heads)
        grad_v[:, :, :seen] += summed(weights.transpose(-1, -2) @ ups, heads)
    return torch.cat(grads_q, 2), grad_k, grad_v


def tiles(q: Tensor, is_causal: bool) -> Iterator[tuple[slice, int | None]]:
    """Consecutive queries, and how many keys the last of them sees; None: all."""
    for start in range(0, max(q.shape[2], 1), TILE):
        stop = min(start + TILE, q.shape[2])
        yield slice(start, stop), stop if is_causal else None


def scores_of(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    """scale q k^T in fp32 or fp64, -inf where the mask hides a key: the last query sees the last key.

    Shape:
        q: [batch, heads, queries, d]. k: [batch, kv_heads, keys, d]. Returns [batch, heads, queries, keys].
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ repeated(k, q).to(wide).transpose(-1, -2) * scale
    if is_causal:
        hidden = torch.full(scores.shape[-2:], -math.inf, dtype=wide, device=q.device)
        scores = scores + hidden.triu(1 + scores.shape[-1] - scores.shape[-2])
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
