"""Sizes and options of a Mixtral-shaped mixture of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.errors import ConfigError, nearest
from thinwire.models.capacity import check_capacity
from thinwire.models.llama import LlamaConfig
from thinwire.models.lookahead import NOT_CAUSAL, SOFT
from thinwire.table import Row

ROUTERS = ("linear", "noisy", "cosine", "sigmoid")
BALANCES = ("gshard", "importance-load")


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """Sizes of a Mixtral-shaped decoder; the fields carry the names of a Hugging Face `config.json`.

    Raises ConfigError as LlamaConfig does, and for what the fields below rule out.
    """

    intermediate_size: int = 512
    """Inner width of one expert."""
    num_local_experts: int = 8
    """Experts of a layer, on all ranks together."""
    num_experts_per_tok: int = 2
    """Experts that work on one token; at most num_local_experts."""
    router_aux_loss_coef: float = 0.01
    """Weight of the loss that balances the experts, in training; 0: no such loss."""
    router: str = "linear"
    """How tokens choose experts: linear, noisy (normal noise on the logits in training), cosine (of a low-rank
    projection), or sigmoid. A layer of a model that is not causal may have expert-choice or softmoe."""
    router_noise: float = 1.0
    """Of the noisy router: the noise's standard deviation is this over num_local_experts; above 0."""
    router_rank: int = 32
    """Of the cosine router: width that tokens are projected to."""
    slots: int = 1
    """Of softmoe: slots of an expert in a sequence, each a mixture of its tokens."""
    balance: str = "gshard"
    """The loss that balances: gshard, or importance-load, which needs the noisy router."""
    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum. A token's only expert keeps its score."""
    weigh_inputs: bool = False
    """Multiply an expert's input by its weight, in place of its output."""
    capacity_factor: float = 0.0
    """Most rows that an expert takes of a rank's tokens, num_experts_per_tok * int(f * ceil(tokens /
    num_local_experts)), or for f < 0 the same by -f, but no more than are asked for; the rows above it are dropped. 0:
    as many as are asked for."""
    batch_priority: bool = False
    """With a capacity, the tokens with the highest scores come first, in place of the first tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_local_experts", "num_experts_per_tok", "router_noise", "router_rank", "slots"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above zero")
        if self.num_experts_per_tok > self.num_local_experts:
            raise ConfigError(
                f"num_experts_per_tok={self.num_experts_per_tok}: must be at most num_local_experts="
                f"{self.num_local_experts}; nearest is {self.num_local_experts}"
            )
        if not math.isfinite(self.capacity_factor):
            raise ConfigError(f"capacity_factor={self.capacity_factor}: must be a finite number; nearest is 0.0")
        if self.router_aux_loss_coef < 0:
            raise ConfigError(f"router_aux_loss_coef={self.router_aux_loss_coef}: must be at least 0; nearest is 0")
        for name, known in (("router", ROUTERS + NOT_CAUSAL), ("balance", BALANCES)):
            if getattr(self, name) not in known:
                hint = nearest(getattr(self, name), known) or f"; one of {', '.join(known)}"
                raise ConfigError(f"{name}={getattr(self, name)!r}: no such choice{hint}")
        if self.balance == "importance-load" and self.router != "noisy":
            raise ConfigError(
                f"balance='importance-load' needs the noise of router='noisy', not {self.router!r}; nearest: gshard"
            )

        self._check_limits()

    def _check_limits(self) -> None:
        """Raise ConfigError for options of dropped rows beside a router that drops none."""
        if self.router == SOFT and self.capacity_factor:
            raise ConfigError(
                f"capacity_factor={self.capacity_factor:g} with router={SOFT!r}: its experts take their slots and drop "
                "nothing; nearest: 0.0"
            )
        if self.router in NOT_CAUSAL and self.batch_priority:
            raise ConfigError(
                f"batch_priority=True with router={self.router!r}: no token's row is dropped; nearest: False"
            )

    def capacity_rows(self, num_tokens: int) -> list[Row]:
        """Rows about the capacity for a rank's number of tokens, and about what has no effect.

        Raises ConfigError for a capacity below one row.
        """
        factor, top_k, num_experts = self.capacity_factor, self.num_experts_per_tok, self.num_local_experts
        idle: list[Row] = [
            (f"{name} {getattr(self, name)}", "no effect", f"it is of router {router}, not of {self.router}")
            for name, router in (("router_noise", "noisy"), ("router_rank", "cosine"), ("slots", SOFT))
            if self.router != router and getattr(self, name) != getattr(MoEConfig, name)
        ]
        if self.norm_topk_prob and top_k == 1:
            why = "a token's only expert keeps its score: a weight that is always 1 would not train the router"
            idle.append(("norm_topk_prob True", "no effect", why))
        if not factor:
            why = "without a capacity, no row is dropped"
            return [*idle, ("batch_priority True", "no effect", why)] if self.batch_priority else idle
        limit = check_capacity(factor, num_tokens, num_experts, top_k)
        asked = f"an even router asks for {-(-num_tokens * top_k // num_experts)}; rows above are dropped, and counted"
        kept = "those of the highest scores" if self.batch_priority else "the first"
        return [
            *idle,
            (
                f"capacity_factor {factor:g}",
                f"{limit} rows of an expert, of a rank's {num_tokens} tokens: {kept}",
                asked,
            ),
        ]
