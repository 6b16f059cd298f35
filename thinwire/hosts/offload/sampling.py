"""Linear layers that keep a sample of their inputs' rows for the gradient of their weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from thinwire.codecs import derive_seed
from thinwire.codecs.random import named_seed
from thinwire.hosts.offload.activations import part_number, part_of
from thinwire.hosts.offload.norms import SeenNorms
from thinwire.hosts.offload.products import ProductRows, SampledProducts, fused_attention
from thinwire.layout.layers import layers_of
from thinwire.methods.memory.sampling import chosen, num_kept
from thinwire.table import Row

Chooses = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


class KeptRows(NamedTuple):
    """What is kept of an input: its rows [k, features], each times what it counts, and their numbers, int64 [k].

    note: takes the norms of the gradients of the layer's output.
    """

    source: weakref.ref[Tensor]
    version: int
    rows: Tensor
    places: Tensor
    note: Callable[[Tensor], None] | None


class RowSampler:
    """Lets every linear layer inside the model's layers keep a sample of its input's rows; see `chosen`.

    Outputs and the gradients of inputs are exact. A row weighs what its norm is, times that of the gradient of the
    layer's output when its sequence was last seen, see `SeenNorms`, if the numbers of sequences are told. Layers that
    are given the same tensor, such as those of q, k and v, share one sample. Products of two activations inside the
    layers, as of attention, keep a sample of the first one's rows, see `SampledProducts`, which weigh what their norms
    are. Draws depend on the seed, the numbers of the forward in its step and of the slice, and the name of the first
    such layer: a layer that is computed again draws the same rows. Rows that a keyword argument `attention_mask`
    [batch, seq] of the model leaves out are neither counted nor kept. In forwards without gradients, and of layers
    whose weights have none, nothing is drawn.

    Attributes:
        seed: of the step under way.
        seen: None: rows weigh what their norms are.

    chooses: which rows are kept, see `chosen`.
    """

    def __init__(
        self, model: nn.Module, ratio: float, seen: SeenNorms | None = None, chooses: Chooses = chosen
    ) -> None:
        self.ratio, self.seen, self._chooses = ratio, seen, chooses
        self.seed: Callable[[], int] = lambda: 0
        self._number = 0
        self._step: int | None = None
        self._last: KeptRows | None = None
        self._mask: Tensor | None = None
        names = {module: name for name, module in model.named_modules()}
        self._fused = fused_attention(model)
        for layer in layers_of(model):
            layer.forward = partial(self._in_layer, names[layer], layer.forward)
        linears = linear_layers(model)
        self.num_layers = len(linears)
        for linear in linears:
            linear.forward = partial(self._forward, names[linear], linear, linear.forward)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)

    @property
    def attention_row(self) -> Row:
        """What becomes of the products of attention."""
        what = "attention's q k and p v"
        if self._fused is not None:
            return what, "exact: no rows of them are kept", self._fused
        why = "the gradients of k and v are estimates; p in fp32 without dropout stays whole with its softmax"
        return what, f"{self.ratio:g} of the rows of q and p, for each head", why

    def begin_anew(self) -> None:
        """Forget the step under way, and what was seen."""
        self.seen, self._step, self._last = None, None, None

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            step = self.seed()
            self._number = self._number + 1 if step == self._step else 0
            self._step, self._last = step, None
            mask = kwargs.get("attention_mask")
            self._mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def _forward(self, name: str, linear: nn.Module, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        weight, bias = linear._parameters["weight"], linear._parameters["bias"]
        if weight is None or not (torch.is_grad_enabled() and weight.requires_grad):
            return plain(x)
        kept = self._last
        if kept is None or kept.source() is not x or kept.version != x._version:
            kept = self._last = self._keep(name, x.detach(), weakref.ref(x))
        by_rows = weight if isinstance(linear, nn.Linear) else weight.T
        return SampledLinear.apply(x, by_rows, bias, kept.rows, kept.places, kept.note)

    def _in_layer(self, name: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        with SampledProducts(partial(self._keep_product, name)):
            return plain(*args, **kwargs)

    def _keep_product(self, name: str, a: Tensor, number: int) -> ProductRows | None:
        """What is kept of a factor; None: all of it. number: of the product in its layer."""
        size = a.shape[-2]
        mask = self._counts(len(a) * size) if a.dim() == 4 else None
        counts = None if mask is None else mask.view(len(a), 1, size) != 0
        num = num_kept(self.ratio, size if counts is None else max(1, int(counts.sum(-1).max())))
        if num >= size:
            return None
        weights = torch.linalg.vector_norm(a, dim=-1, dtype=torch.float32)
        weights = weights if counts is None else weights * counts
        index, scales = self._chooses(weights, num, self._draws_of(f"{name} product {number}"))
        rows = a.gather(-2, index.unsqueeze(-1).expand(*index.shape, a.shape[-1]))
        return ProductRows(rows * scales.to(a.dtype).unsqueeze(-1), index)

    def _draws_of(self, name: str) -> int:
        """The seed of what is drawn now. Slices of a layer have draws of their own, and so does a forward."""
        part = part_number()
        return derive_seed(named_seed(self.seed(), name), self._number, *([part] if part else []))

    def _counts(self, num_rows: int) -> Tensor | None:
        """Which of as many rows the model's mask leaves in; None: it has others."""
        mask = None if self._mask is None else self._mask[part_of(len(self._mask))].flatten()
        return mask if mask is not None and len(mask) == num_rows else None

    def _keep(self, name: str, x: Tensor, source: weakref.ref[Tensor]) -> KeptRows:
        rows = x.flatten(0, -2)
        counts = self._counts(len(rows))
        num = num_kept(self.ratio, len(rows) if counts is None else max(1, int(counts.count_nonzero())))
        weights = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
        weights = weights if counts is None else weights * (counts != 0)
        seen = None if self.seen is None else self.seen.weights(name, len(rows))
        weights = weights if seen is None else weights * seen.to(weights)
        index, scales = self._chooses(weights, num, self._draws_of(name))
        note = None if self.seen is None else self.seen.noting(name)
        return KeptRows(source, x._version, rows[index] * scales.to(x.dtype).unsqueeze(1), index, note)


def norms_bytes(model: nn.Module, seq_len: int, num_sequences: int, num_ranks: int) -> int:
    """The most bytes that `SeenNorms` takes on a rank; less where layers share an input, and with it their norms."""
    return 2 * seq_len * len(linear_layers(model)) * -(-num_sequences // num_ranks)


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """The linear layers inside the model's layers, each once; also those of transformers whose weight is transposed."""
    found = (each for layer in layers_of(model) for each in layer.modules())
    return list(dict.fromkeys(each for each in found if isinstance(each, nn.Linear) or is_transposed(each)))


def is_transposed(module: nn.Module) -> bool:
    """Whether it is a Conv1D of transformers: x W + b, with W [inputs, outputs]."""
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
    return "transformers.pytorch_utils.Conv1D" in names


class SampledLinear(torch.autograd.Function):
    """x W^T + b, whose gradient by W is estimated from the rows that were kept of x."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, index: Tensor,
        note: Callable[[Tensor], None] | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(weight, rows, index)
        ctx.note = note  # type: ignore[attr-defined]
        ctx.has_bias = bias is not None  # type: ignore[attr-defined]
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, rows, index = ctx.saved_tensors
        by_input = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        flat = grad.flatten(0, -2)
        if ctx.note is not None:
            ctx.note(torch.linalg.vector_norm(flat, dim=1, dtype=torch.float32))
        by_weight = (flat[index].T @ rows.to(grad.dtype)).to(weight.dtype)
        by_bias = flat.sum(0).to(weight.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return by_input, by_weight, by_bias, None, None, None
