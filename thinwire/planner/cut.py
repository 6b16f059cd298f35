"""The shapes of a model on one rank of a tensor axis."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from thinwire.models import Llama, MoELlama
from thinwire.models.tensor import check_cut, cut_skeleton
from thinwire.planner.forward import dense_of


def cut_model(model: Llama, size: int) -> Llama:
    """What one of `size` tensor ranks has of a model without memory. Raises ConfigError as `check_cut` does.

    Of a mixture each rank has a part of every expert's inner width. The configuration stays that of the whole model.
    """
    if size == 1:
        return model
    if not isinstance(model, MoELlama):
        own = copy.deepcopy(model)
        cut_skeleton(own, size)
        return own
    config = model.config
    check_cut(config, size)
    with torch.device("meta"):
        dense = Llama(dense_of(config))
        mixture = MoELlama(replace(config, intermediate_size=config.intermediate_size // size))
    cut_skeleton(dense, size)
    for layer, of_dense in zip(mixture.model.layers, dense.model.layers, strict=True):
        layer.self_attn = of_dense.self_attn
    mixture.model.embed_tokens, mixture.lm_head, mixture.config = dense.model.embed_tokens, dense.lm_head, config
    return mixture
