"""What a forward keeps for its backward: all activations, or only each layer's input."""

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
    """Make every layer keep only its input and recompute the rest in backward. Return the number of layers."""
    layers = layers_of(model)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return len(layers)


def kept_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes that a forward keeps for its backward besides weights; each storage counts once.

    model, inputs: on the meta device, so nothing is computed.
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
    """A Llama without memory, with the loss that a run with these tokens in a micro-batch uses."""
    if loss_in_effect(asked, tokens.numel(), skeleton.config.vocab_size)[0] == "plain":
        return skeleton
    model = copy.deepcopy(skeleton)
    cut_loss(model, model.lm_head)
    return model
