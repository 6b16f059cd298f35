"""Products of two activations, such as those of attention, that keep a sample of the first one's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.overrides import TorchFunctionMode

from thinwire.models.llama import LONGEST_PLAIN_ATTENTION, Attention

PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
# Their first argument is added to the product.
ADDING = {torch.baddbmm, Tensor.baddbmm}


class ProductRows(NamedTuple):
    """What is kept of A [..., n, d]: rows [..., k, d], each times what it counts, and their numbers, int64 [..., k]."""

    rows: Tensor
    places: Tensor


class SampledProducts(TorchFunctionMode):
    """Context in which A B of two activations keeps rows of A for the gradient of B. A B and A's gradient are exact.

    Both have three dimensions or more, and as many matrices. Weights are no activations. The output of a softmax is
    kept by the softmax anyway, so rows of it are not kept besides.

    keep: (A, number of the product in this context) -> what is kept of A; None: all of it.
    """

    def __init__(self, keep: Callable[[Tensor, int], ProductRows | None]) -> None:
        super().__init__()
        self._keep, self._number = keep, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, first = kwargs or {}, int(func in ADDING)
        is_product = (func in PRODUCTS or func in ADDING) and len(args) == first + 2 and given.keys() <= {"alpha"}
        if is_product and are_activations(*args[first:]) and not any(added.requires_grad for added in args[:first]):
            self._number += 1
            if (kept := self._keep(args[first].detach(), self._number)) is not None:
                call = partial(func, *args[:first])
                return SampledProduct.apply(*args[first:], *kept, call, given.get("alpha", 1.0))
        return func(*args, **given)


def are_activations(a: Any, b: Any) -> bool:
    """Whether a product of these is one that `SampledProducts` samples."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.requires_grad and b.requires_grad):
        return False
    if min(a.dim(), b.dim()) < 3 or a.shape[:-2] != b.shape[:-2]:
        return False
    # A view of a weight is one, too.
    weights = any(isinstance(each, nn.Parameter) for x in (a, b) for each in (x, x._base))
    return not weights and "Softmax" not in type(a.grad_fn).__name__


class SampledProduct(torch.autograd.Function):
    """alpha A B, whose gradient by B is estimated from the rows that were kept of A."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, a: Tensor, b: Tensor, rows: Tensor, index: Tensor, call: Callable[..., Tensor], alpha: float
    ) -> Tensor:
        found = call(a, b, alpha=alpha) if call.func in ADDING else call(a, b)  # type: ignore[attr-defined]
        # A view would keep the storage of its base, such as q, k and v together.
        is_part = b.untyped_storage().nbytes() > b.nbytes
        ctx.save_for_backward(b.clone() if is_part else b, rows.to(found.dtype), index)
        ctx.alpha = alpha  # type: ignore[attr-defined]
        ctx.a_dtype = a.dtype  # type: ignore[attr-defined]
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        b, rows, index = ctx.saved_tensors
        by_a = (grad @ b.to(grad.dtype).mT) * ctx.alpha if ctx.needs_input_grad[0] else None
        of_rows = grad.gather(-2, index.unsqueeze(-1).expand(*index.shape, grad.shape[-1]))
        by_b = (rows.to(grad.dtype).mT @ of_rows) * ctx.alpha
        return None if by_a is None else by_a.to(ctx.a_dtype), by_b.to(b.dtype), None, None, None, None


def fused_attention(model: nn.Module) -> str | None:
    """Why the products of a model's attention can't be sampled; None: they are, where a layer computes them.

    A fused kernel never has the products.
    """
    modules = list(model.modules())
    named = {getattr(getattr(each, "config", None), "_attn_implementation", None) for each in modules}
    fused = sorted(name for name in named if isinstance(name, str) and name != "eager")
    if fused:
        return f'{", ".join(fused)} is fused; attention that is not: "attn_implementation": "eager" in config.json'
    if not any(isinstance(each, Attention) for each in modules):
        return None
    length = getattr(model, "max_seq_len", 0)
    if length > LONGEST_PLAIN_ATTENTION:
        return f"sequences of more than {LONGEST_PLAIN_ATTENTION} tokens take a fused kernel"
    return "a fused kernel computes them on a GPU" if next(model.parameters()).device.type == "cuda" else None
