"""What a forward keeps for its backward: all activations, or only each layer's input."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from thinwire.layout.layers import layers_of
from thinwire.losses import cut_loss, loss_in_effect
from thinwire.models.llama import Llama, LlamaConfig

# In which a forward may compute.
DTYPES = ("bf16", "fp32")


def recompute(model: nn.Module) -> int:
    """Make every layer keep only its input and recompute the rest in backward. Return the number of layers."""
    layers = layers_of(model)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return len(layers)


def kept_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes that a forward keeps for its backward besides weights; each storage counts once.

    model, inputs: may be tensors without memory, so that nothing is computed.
    """
    # Storages are held, so that no other takes the place of one that is gone.
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
        return tensor

    def pack_inputs(layer: nn.Module, given: tuple[Any, ...]) -> None:
        for tensor in given:
            pack(tensor)

    # What is given to a layer that is computed again passes no hook of saved tensors.
    again = [layer for layer in layers_of(model) if getattr(vars(layer).get("forward"), "func", None) is checkpoint]
    hooks = [layer.register_forward_pre_hook(pack_inputs) for layer in again]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    for hook in hooks:
        hook.remove()
    weights = {param.untyped_storage()._cdata for param in model.parameters()}
    return sum(storage.nbytes() for key, storage in found.items() if key not in weights)


def kept_by(
    config: LlamaConfig, loss: str, batch: int, seq_len: int, dtype: str = "auto", *, recomputes: bool = False
) -> int:
    """What a micro-batch of a Llama keeps on a CPU, computed with its kernels on tensors without memory.

    Of one and of two layers, as all are alike.

    Args:
        loss: see `loss_in_effect`.
        dtype: "bf16", whose copies of weights are kept too; "fp32"; or "auto": the larger of both.
        recomputes: each layer keeps only its input.
    """
    if dtype not in DTYPES:
        return max(kept_by(config, loss, batch, seq_len, each, recomputes=recomputes) for each in DTYPES)
    one, two = (
        _kept_by_all(replace(config, num_hidden_layers=num), loss, batch, seq_len, dtype, recomputes=recomputes)
        for num in (1, 2)
    )
    return one + (config.num_hidden_layers - 1) * (two - one)


def _kept_by_all(config: LlamaConfig, loss: str, batch: int, seq_len: int, dtype: str, *, recomputes: bool) -> int:
    with FakeTensorMode():
        model, tokens = Llama(config), torch.zeros(batch, seq_len, dtype=torch.int64)
        if loss_in_effect(loss, tokens.numel(), config.vocab_size)[0] == "cut":
            cut_loss(model, model.lm_head)
        if recomputes:
            recompute(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            return kept_bytes(model, tokens, tokens)
