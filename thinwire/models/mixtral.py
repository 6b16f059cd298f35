"""A mixture in the names and shapes of transformers' MixtralForCausalLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.models.moe_config import MoEConfig


def mixtral_config(config: MoEConfig) -> dict[str, Any]:
    """Sizes for a `config.json` of transformers. Raises ConfigError for options that a Mixtral does not have."""
    plain = MoEConfig()
    if config.num_experts_per_tok == 1:
        raise ConfigError(
            "num_experts_per_tok=1: transformers' Mixtral gives a token's only expert the weight 1, here it has its "
            "score; nearest is 2"
        )
    for name in ("router", "norm_topk_prob", "weigh_inputs", "capacity_factor"):
        # In evaluation a noisy router adds no noise.
        if getattr(config, name) != getattr(plain, name) and getattr(config, name) != "noisy":
            raise ConfigError(
                f"{name}={getattr(config, name)!r}: transformers' Mixtral has only {getattr(plain, name)!r}"
            )
    own = {
        "router",
        "router_noise",
        "router_rank",
        "slots",
        "balance",
        "norm_topk_prob",
        "weigh_inputs",
        "capacity_factor",
    }
    return {name: value for name, value in asdict(config).items() if name not in own | {"batch_priority"}}


def mixtral_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a MoELlama in the names and shapes of a Mixtral's files: w1 gate, w3 up, w2 down transposed."""
    pairs = ((tensor, part) for name, tensor in state.items() for part in mixtral_parts(name, tensor.shape))
    return {own: take(tensor) for tensor, (own, take) in pairs}


def mixtral_parts(name: str, shape: torch.Size) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """What a Mixtral's files have of a tensor of a MoELlama: their names, and what each takes of it."""
    prefix, is_expert, kind = name.partition(".mlp.experts.")
    if not is_expert:
        yield name.replace(".mlp.gate.", ".block_sparse_moe.gate."), lambda whole: whole
        return
    number = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[kind]
    for expert in range(shape[0]):
        yield f"{prefix}.block_sparse_moe.experts.{expert}.{number}.weight", partial(_matrix, expert, number == "w2")


def _matrix(expert: int, transposed: bool, whole: Tensor) -> Tensor:
    return whole[expert].t().contiguous() if transposed else whole[expert]
