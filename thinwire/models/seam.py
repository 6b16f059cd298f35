"""What all mixtures of experts have in common, thinwire's and those of transformers: their experts, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from thinwire.errors import ConfigError
from thinwire.models.fused import FusedExperts, fused_experts
from thinwire.models.hf import HFCausalLM
from thinwire.models.kept import KeptValues
from thinwire.models.moe import Experts, MoELlama


@dataclass(frozen=True)
class MixtureSizes:
    """Sizes of a mixture: layers with experts, experts of each, their inner width, the rows' width, experts of a token.

    capacity_factor: of the next forward; 0: no row is dropped. kept_numel: elements of one expert that pruning has
    kept; 0: it is not pruned.
    """

    layers: int
    experts: int
    inner: int
    width: int
    top_k: int
    capacity_factor: float = 0.0
    kept_numel: int = 0

    @property
    def expert_numel(self) -> int:
        """Elements of one expert's three matrices."""
        return 3 * self.inner * self.width


def experts_of(model: nn.Module, name: str = "") -> dict[str, Experts | FusedExperts]:
    """The experts of each layer, by the path of their module.

    name: what messages call the model. Raises ConfigError for a model without experts, and for packed experts of
    transformers of an unknown form.
    """
    own = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    found: dict[str, Experts | FusedExperts] = {**own, **(fused_experts(model) if not own else {})}
    if not found:
        raise ConfigError(
            f"{name or type(model).__name__} has no experts that can lie on several ranks; nearest: a mixture such as "
            "moe-demo"
        )
    return found


def module_of(experts: Experts | FusedExperts) -> nn.Module:
    """The module that the model calls."""
    return experts.module if isinstance(experts, FusedExperts) else experts


def mixture_of(model: nn.Module) -> MixtureSizes | None:
    """The sizes of a mixture; None for another model."""
    if isinstance(model, MoELlama):
        own, factor = model.config, model.capacity_factor
        sizes = own.num_hidden_layers, own.num_local_experts, own.intermediate_size, own.hidden_size
        return MixtureSizes(*sizes, own.num_experts_per_tok, factor, kept_of(next(iter(experts_of(model).values()))))
    found = list(fused_experts(model).values()) if isinstance(model, HFCausalLM) else []
    if not found or not isinstance(model, HFCausalLM):
        return None
    first = found[0]
    top_k = model.model.config.num_experts_per_tok
    return MixtureSizes(
        len(found), first.num_experts, first.inner, first.width, top_k, kept_numel=kept_of(first)
    )  # fmt: skip


def kept_of(experts: Experts | FusedExperts) -> int:
    """Elements of one expert that pruning has kept, in parameters that have the experts first; 0: it is not pruned."""
    module = module_of(experts)
    is_pruned = any(isinstance(each, KeptValues) for each in module.modules())
    return sum(param.numel() // len(param) for param in module.parameters()) if is_pruned else 0
