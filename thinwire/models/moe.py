"""A Mixtral-shaped mixture of experts: the model of `Llama`, whose MLP is a router and several experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.models.balance import gshard_loss, importance_load_loss, summed_over_ranks
from thinwire.models.capacity import RowCounts, capacity
from thinwire.models.experts import Experts
from thinwire.models.hf import HFCausalLM
from thinwire.models.llama import Llama, next_token_loss, with_gradient_of
from thinwire.models.lookahead import EXPERT_CHOICE, NOT_CAUSAL, SOFT, SoftSlots
from thinwire.models.mixtral import mixtral_config, mixtral_weights
from thinwire.models.moe_config import MoEConfig
from thinwire.models.noise import TokenNoise
from thinwire.models.order import Order, drop
from thinwire.models.router import FIRST_LOG_TEMPERATURE, Router

# What users of a mixture import from here, wherever it is written.
__all__ = [
    "MIXTURES",
    "Experts",
    "MoE",
    "MoEConfig",
    "MoELlama",
    "Order",
    "Router",
    "check_axes",
    "check_parts",
    "mixtral_config",
    "mixtral_weights",
]


class MoE(nn.Module):
    """A router and its experts: a layer of MoELlama, or of a model of your own.

    In a model of your own, call `init_weights` once. sums: of the last forward in training, for the balance loss, see
    Choice. capacity_factor: for the next forward.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config, self.capacity_factor = config, config.capacity_factor
        soft = SoftSlots(config.num_local_experts, config.slots, config.hidden_size) if config.router == SOFT else None
        self.gate, self.experts = soft or Router(config), Experts(config)
        self.sums: Tensor | None = None

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """All matrices from N(0, 0.02^2)."""
        for name, param in self.named_parameters():
            if name.endswith("log_temperature"):
                param.fill_(FIRST_LOG_TEMPERATURE)
            else:
                param.normal_(std=0.02, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x` [batch, seq, hidden] to the same shape."""
        if isinstance(self.gate, SoftSlots):
            return self.gate.mixed(x, self.experts)
        flat, config = x.flatten(0, -2), self.config
        choice = self.gate(flat)
        self.sums = choice.sums if self.training else None
        index = choice.index
        if self.capacity_factor and len(flat) and config.router != EXPERT_CHOICE:
            sizes = len(flat), config.num_local_experts, config.num_experts_per_tok
            limit = capacity(self.capacity_factor, *sizes, most=len(flat))
            priority = choice.best if config.batch_priority else None
            index = drop(index, config.num_local_experts, limit, priority)
        return self.experts(flat, index, choice.weights).view_as(x)

    @property
    def across(self) -> str:
        """By which option a token's result depends on all tokens of its batch; empty: by none."""
        router = self.config.router
        if router == EXPERT_CHOICE or (router == "noisy" and self.training):
            return f"router {router!r}"
        return f"capacity_factor {self.capacity_factor:g}" if self.capacity_factor and router != SOFT else ""


class MoELlama(Llama):
    """A Mixtral-shaped causal language model; `mixtral_weights` are those of transformers' MixtralForCausalLM.

    In training it returns the loss of the text, and its gradient also has router_aux_loss_coef times that of the
    layers' mean balance loss. So the displayed loss can be compared for any number of ranks and micro-batches.

    Attributes:
        gather: a collective that returns the sums of all ranks in training, so that the balance loss is that of the
            global batch; None: this rank's sums only.
        text_weight: what the caller multiplies the next loss by, which is not meant for the balance loss.
        draws: of a noisy router in training: a seed, and the numbers of the next forward's sequences, int64 [batch].
            What a token draws follows from them and its position, on any ranks. None: torch's generator draws a seed.
        row_counts: rows that routers have requested in training, on all ranks of `gather`; counted if there is a
            balance loss or a capacity, or if `counts_rows` says so.

    Source: Jiang et al., "Mixtral of experts" (2024).
    """

    config: MoEConfig

    def __init__(self, config: MoEConfig, seed: int = 0) -> None:
        if config.router in NOT_CAUSAL:
            raise ConfigError(
                f"router={config.router!r} chooses by tokens that come later, which a causal model can't; nearest: "
                "linear, or a layer thinwire.models.moe.MoE in a model that is not causal"
            )
        super().__init__(config, seed)
        self.gather: Callable[[Tensor], Tensor] | None = None
        self.text_weight = 1.0
        self.draws: tuple[int, Tensor] | None = None
        self.row_counts, self.counts_rows = RowCounts(config.num_experts_per_tok), False

    def make_mlp(self) -> nn.Module:
        return MoE(self.config)

    def first(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        if name.endswith("log_temperature"):
            return torch.full(shape, FIRST_LOG_TEMPERATURE)
        return super().first(name, shape, generator)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        if self.training and self.config.router == "noisy":
            noise = TokenNoise.of(tokens, self.model.positions(tokens), self.draws)
            routers = [module for module in self.modules() if isinstance(module, Router)]
            for layer, router in enumerate(routers):
                # Stays until the next forward: a layer may be computed again in the backward.
                router.noise = noise.normals(layer, self.config.num_local_experts)
        logits = super().forward(tokens, None, documents)
        if targets is None:
            return logits
        return self.balanced(next_token_loss(logits, targets))

    def balanced(self, loss: Tensor) -> Tensor:
        """The loss of a text; in training, with the gradient of the last forward's balance loss."""
        if not self.training or not torch.is_grad_enabled():
            return loss
        if not self.config.router_aux_loss_coef:
            if self.capacity_factor or self.counts_rows:
                self._told(self._sums().detach())
            return loss
        return with_gradient_of(loss, self.config.router_aux_loss_coef / self.text_weight * self.balance_loss())

    @property
    def capacity_factor(self) -> float:
        """The capacity factor of the next forward, the same on all ranks. It may change from step to step."""
        return next(block.capacity_factor for block in self.modules() if isinstance(block, MoE))

    @capacity_factor.setter
    def capacity_factor(self, factor: float) -> None:
        replace(self.config, capacity_factor=factor)
        for block in self.modules():
            if isinstance(block, MoE):
                block.capacity_factor = factor

    def _sums(self) -> Tensor:
        """The sums of the last forward in training, [layers, 4, experts]."""
        return torch.stack([each.sums for each in self.modules() if isinstance(each, MoE) and each.sums is not None])

    def _told(self, sums: Tensor) -> Tensor:
        """The `sums` of all ranks, [ranks, layers, 4, experts]. Counts their rows. A collective."""
        every = sums[None] if self.gather is None else self.gather(sums)
        self.row_counts.note(every[:, 0, 1].sum(-1), every[:, :, 3], self.capacity_factor)
        return every

    def balance_loss(self) -> Tensor:
        """The mean over layers of the last forward's balance loss in training."""
        sums = summed_over_ranks(self._sums(), self._told)
        of_layers = gshard_loss(sums) if self.config.balance == "gshard" else importance_load_loss(sums)
        return of_layers.mean()


def check_parts(model: nn.Module) -> None:
    """Raise ConfigError for a mixture of experts that can't pass a batch in parts."""
    found = (module.across for module in model.modules() if isinstance(module, MoE))
    if across := next(filter(None, found), ""):
        raise ConfigError(
            f"slices beside {across} of a mixture, which is of all tokens of a batch; leave one of both out"
        )


def check_axes(model: nn.Module, sizes: Mapping[str, int], flags: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for a mixture of experts on an axis that would lose its balance loss.

    sizes: of the axes. flags: of the axes that flags state.
    """
    is_ours, is_theirs = isinstance(model, MoELlama), isinstance(model, HFCausalLM) and bool(model.balance_weight)
    alone = ("pipeline", "tensor") if is_ours else ("pipeline", "sequence", "tensor")
    cut = [axis for axis in alone if sizes.get(axis, 1) > 1]
    if cut and (is_ours or is_theirs):
        flag = (flags or {}).get(cut[0], "")
        stated, near = (f"{flag} {sizes[cut[0]]}: ", f"{flag} 1") if flag else ("", f"no {cut[0]} axis")
        near += ", or a preset such as moe-demo" * (cut == ["sequence"])
        raise ConfigError(
            f"{stated}a mixture of {'experts' if is_ours else 'transformers with a balance loss'} on a {cut[0]} axis: "
            f"not supported, its balance loss is of whole {'models' if is_ours else 'sequences and all layers'}; "
            f"nearest: {near}"
        )


MIXTURES: dict[str, MoEConfig] = {
    "moe-tiny": MoEConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    ),
    "moe-demo": MoEConfig(),
}
