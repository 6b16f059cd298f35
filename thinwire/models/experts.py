"""SwiGLU experts: products of rows that are sorted by expert, and the weighted sum over each token's experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from thinwire.models.moe_config import MoEConfig
from thinwire.models.order import Order
from thinwire.models.row_hooks import RowHooks


def loop_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The product of each expert's rows [rows, a] with its own matrix in `weights` [experts, a, b], one by one.

    Shape:
        counts: int64 [experts], number of rows of each. result: [rows, b].
    """
    blocks = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([block @ weight for block, weight in blocks])


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The same as `loop_product`, by torch's grouped kernel if it supports these tensors.

    On the CPU it has no float64, and every row must be a multiple of 16 bytes.
    """
    sizes = (rows.shape[1] * rows.element_size(), weights.shape[2] * weights.element_size())
    fits = rows.dtype in (torch.float32, torch.bfloat16) and not any(size % 16 for size in sizes)
    if not (fits and len(rows) and hasattr(F, "grouped_mm")):
        return loop_product(rows, weights, counts)
    return F.grouped_mm(rows, weights, offs=counts.cumsum(0).to(torch.int32))


class Experts(nn.Module):
    """SwiGLU experts. A range of one expert's hidden units is one range of memory in each of the three tensors.

    They are called like experts of transformers: experts(x, top_k_index, top_k_weights). row_hooks: see RowHooks.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts, self.weigh_inputs = config.num_local_experts, config.weigh_inputs
        self.inner, self.width = config.intermediate_size, config.hidden_size
        self.row_hooks = RowHooks()
        shape = (config.num_local_experts, self.inner, self.width)
        self.gate_proj, self.up_proj, self.down_proj = (nn.Parameter(torch.empty(shape)) for _ in range(3))

    @property
    def is_sliceable(self) -> bool:
        """Whether ranks may share an expert: what is kept of a pruned one's last matrix lies by outputs."""
        return not is_parametrized(self)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """gate, up and down of the experts, or parts of experts, that are here, [experts, inner, hidden] each."""
        return self.gate_proj, self.up_proj, self.down_proj

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum [tokens, hidden] over each token's experts.

        Shape:
            x: [tokens, hidden].
            top_k_index: int64 [tokens, k]; `num_experts` means no expert.
            top_k_weights: [tokens, k].
        """
        work = between_ranks(self.row_hooks, lambda rows, order: self.work(rows, order.counts))
        return mixed(x, top_k_index, top_k_weights, self.num_experts, self.weigh_inputs, work)

    def work(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The result of `swiglu` with the weights of these experts.

        Shape:
            rows: [rows, hidden], sorted by expert. counts: int64 [experts], number of rows of each.
            Returns [rows, hidden].
        """
        return self.product(rows, counts, self.weights)

    def product(self, rows: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The same with other weights, in the form of `weights`."""
        there = self.row_hooks.run("after_dispatch", rows)
        return self.row_hooks.run("before_combine", swiglu(there, counts, weights))


def between_ranks(hooks: RowHooks, work: Callable[[Tensor, Order], Tensor]) -> Callable[[Tensor, Order], Tensor]:
    """Work on rows, with the hooks of the tokens' rank around it."""
    return lambda rows, order: hooks.run("after_combine", work(hooks.run("before_dispatch", rows), order))


def mixed(
    x: Tensor, index: Tensor, weights: Tensor, num_experts: int, weigh_inputs: bool,
    work: Callable[[Tensor, Order], Tensor],
) -> Tensor:  # fmt: skip
    """The weighted sum over each token's experts, see Experts.

    Args:
        work: (rows sorted by expert, their order) -> the experts' outputs.

    Shape:
        x: [tokens, hidden]. index: int64 [tokens, k]. weights: [tokens, k].
    """
    order = Order.of(index, num_experts)
    of_rows = weights.flatten()[order.choices, None]
    rows = order.encode(x)
    if weigh_inputs:
        return order.decode(work((rows * of_rows).to(x.dtype), order), len(x)).to(x.dtype)
    return order.decode(work(rows, order) * of_rows, len(x)).to(x.dtype)


def dtype_of_work(rows: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which experts compute rows: autocast's, or that of their weights."""
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def swiglu(rows: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """down(silu(gate(x)) * up(x)) of rows [rows, hidden], sorted by expert.

    Shape:
        counts: int64 [experts], rows of each. weights: gate, up and down, [experts, inner, hidden] each.
    """
    dtype = dtype_of_work(rows, weights[0])
    gate, up, down = (weight.to(dtype) for weight in weights)
    rows = rows.to(dtype)
    hidden = F.silu(grouped_product(rows, gate.transpose(1, 2), counts))
    return grouped_product(hidden * grouped_product(rows, up.transpose(1, 2), counts), down, counts)
