"""Experts that transformers packs into two tensors, in the form in which thinwire sends rows and weights to experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from thinwire.errors import ConfigError
from thinwire.models.experts import dtype_of_work, grouped_product
from thinwire.models.row_hooks import row_hooks

# What other forms of packed experts say about themselves, and what those here say.
PLAIN = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True,
         "has_post_expert_norm": False}  # fmt: skip


class FusedExperts:
    """One layer of Mixtral, Qwen3-MoE, OLMoE and their like: tensors gate_up_proj [E, 2 I, H] and down_proj [E, H, I].

    It holds no weights: it reads those of the module, whose `forward` is called as thinwire's own experts are.
    """

    weigh_inputs = False
    # An expert's hidden units are two ranges of one tensor, and columns of the other.
    is_sliceable = False

    def __init__(self, module: Any) -> None:
        self.module = module
        self.num_experts, width, self.width = module.gate_up_proj.shape
        self.inner = width // 2

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """gate, up and down of the experts that are here, [experts, I, H] each; views. Of down, the memory's order."""
        gate, up = self.module.gate_up_proj.chunk(2, dim=1)
        return gate, up, self.module.down_proj.reshape(gate.shape)

    def product(self, rows: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The experts' outputs for rows [rows, H], sorted by expert; counts: int64 [experts], rows of each.

        weights: of these experts, in the form of `weights`.
        """
        dtype = dtype_of_work(rows, weights[0])
        gate, up, down = (weight.to(dtype) for weight in weights)
        hooks = row_hooks(self.module)
        rows = hooks.run("after_dispatch", rows.to(dtype))
        both = [grouped_product(rows, weight.transpose(1, 2), counts) for weight in (gate, up)]
        hidden = self.module._apply_gate(torch.cat(both, -1))
        down = down.reshape(len(down), self.width, self.inner)
        return hooks.run("before_combine", grouped_product(hidden, down.transpose(1, 2), counts))


def holds(module: nn.Module, name: str) -> bool:
    """Whether a module has a parameter of that name, all of it or, if it is pruned, what is kept of it."""
    return isinstance(vars(module)["_parameters"].get(name), nn.Parameter) or is_parametrized(module, name)


def fused_experts(model: nn.Module) -> dict[str, FusedExperts]:
    """The packed experts of a model of transformers, by the path of their module.

    Raises ConfigError for packed experts of another form.
    """
    found: dict[str, FusedExperts] = {}
    for name, module in model.named_modules():
        if not (holds(module, "gate_up_proj") and holds(module, "down_proj")):
            continue
        other = [each for each, plain in PLAIN.items() if getattr(module, each, plain) != plain]
        if other or not hasattr(module, "_apply_gate"):
            said = f"{other[0]} {getattr(module, other[0])}" if other else "no gate of transformers"
            raise ConfigError(
                f"{name}: experts of this form ({said}) can't lie on several ranks; nearest: Mixtral, Qwen3-MoE or "
                "OLMoE, or --experts.parallel 1"
            )
        found[name] = FusedExperts(module)
    return found
