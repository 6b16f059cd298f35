"""Routers of a mixture: which experts work on a token, and with which weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.models.capacity import capacity
from thinwire.models.llama import Linear
from thinwire.models.lookahead import EXPERT_CHOICE, expert_choice
from thinwire.models.moe_config import MoEConfig

# Of the cosine router: the temperature starts at 2, and is at most 100.
FIRST_LOG_TEMPERATURE, MOST_LOG_TEMPERATURE = math.log(2), math.log(100)


@dataclass(frozen=True)
class Choice:
    """A router's choices: index int64 [tokens, k], weights [tokens, k], sums [4, experts] for the balance loss.

    The rows of `sums`, summed over tokens: scores, first choices, the smooth load of the noisy router, and choices.
    best: the highest score of each token, [tokens].
    """

    index: Tensor
    weights: Tensor
    sums: Tensor
    best: Tensor


class Router(nn.Module):
    """Chooses k experts for each token, in fp32 or, in a model of fp64, in fp64.

    linear: softmax(x W). noisy: the same with noise / E. cosine: softmax(t cos(x P, W)). sigmoid: sigmoid(x W).
    noise: of the next forward's tokens, standard normal [tokens, experts]; None: drawn by torch's generator.
    Sources: Shazeer et al. 2017 (noisy), Chi et al. 2022 (cosine), Lewis et al. 2021 (sigmoid).
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        is_cosine = config.router == "cosine"
        width = config.router_rank if is_cosine else config.hidden_size
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, width))
        self.proj = Linear(config.hidden_size, width) if is_cosine else None
        self.log_temperature = nn.Parameter(torch.empty(1)) if is_cosine else None
        self.noise: Tensor | None = None

    def forward(self, x: Tensor) -> Choice:
        """The choices for inputs [tokens, hidden]."""
        with torch.autocast(x.device.type, enabled=False):
            return self._choose(x if x.dtype == torch.float64 else x.float())

    def _choose(self, x: Tensor) -> Choice:
        config, top_k = self.config, self.config.num_experts_per_tok
        clean = logits = self._logits(x)
        deviation = config.router_noise / config.num_local_experts
        if config.router == "noisy" and self.training:
            drawn = torch.randn_like(clean) if self.noise is None else self.noise.to(clean.dtype)
            logits = clean + deviation * drawn
        scores = logits.sigmoid() if config.router == "sigmoid" else logits.softmax(-1)
        if config.router == EXPERT_CHOICE:
            return self._chosen_by_experts(scores)
        weights, index = scores.topk(top_k, dim=-1)
        best = weights[:, 0].detach()
        first = F.one_hot(index[:, 0], config.num_local_experts).to(scores.dtype)
        load = torch.zeros_like(first)
        if config.balance == "importance-load":
            # The chance that an expert is among the k if its own noise were drawn anew.
            least = logits.gather(1, index[:, -1:])
            load = torch.special.ndtr((clean - least) / deviation)
        if config.norm_topk_prob and top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        asked = torch.bincount(index.flatten(), minlength=config.num_local_experts).to(scores.dtype)
        return Choice(index, weights, torch.stack([scores.sum(0), first.sum(0), load.sum(0), asked]), best)

    def _chosen_by_experts(self, scores: Tensor) -> Choice:
        """Choices of experts, so many tokens each as an even router would give them, times the capacity factor."""
        config, num_experts = self.config, self.config.num_local_experts
        sizes = len(scores), num_experts, config.num_experts_per_tok
        index = expert_choice(scores, max(1, capacity(abs(config.capacity_factor) or 1.0, *sizes, most=len(scores))))
        asked = torch.bincount(index.flatten(), minlength=num_experts + 1)[:num_experts].to(scores.dtype)
        none = torch.zeros_like(asked)
        return Choice(index, scores, torch.stack([scores.sum(0), none, none, asked]), scores.detach().amax(-1))

    def _logits(self, x: Tensor) -> Tensor:
        if self.proj is None or self.log_temperature is None:
            return F.linear(x, self.weight.to(x.dtype))
        low = F.normalize(F.linear(x, self.proj.weight.to(x.dtype)), dim=-1)
        cosine = F.linear(low, F.normalize(self.weight.to(x.dtype), dim=-1))
        return cosine * self.log_temperature.clamp_max(MOST_LOG_TEMPERATURE).exp()
