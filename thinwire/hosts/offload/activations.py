"""What a forward keeps for its backward: all of it, or what each layer was given."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.layout.layers import layers_of
from thinwire.losses import cut_loss, loss_in_effect
from thinwire.models.llama import Llama


def recompute(model: nn.Module) -> int:
    """Let every layer keep only its input, and compute the rest again in the backward; returns the number of layers."""
    layers = layers_of(model)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return len(layers)


def kept_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes that a forward keeps for its backward besides weights, each storage counted once.

    model: on the device meta, as are the inputs: nothing is computed.
    """
    # Storages are held, so that no other takes the place of one that is gone.
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    weights = {id(param.untyped_storage()) for param in model.parameters()}
    return sum(storage.nbytes() for key, storage in found.items() if key not in weights)


def with_loss(asked: str, skeleton: Llama, tokens: Tensor) -> Llama:
    """The skeleton of a Llama with the loss that a run of these tokens in a micro-batch has."""
    if loss_in_effect(asked, tokens.numel(), skeleton.config.vocab_size)[0] == "plain":
        return skeleton
    model = copy.deepcopy(skeleton)
    cut_loss(model, model.lm_head)
    return model
