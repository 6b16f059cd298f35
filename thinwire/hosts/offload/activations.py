"""What a forward keeps for its backward: all activations, or only each layer's input. Layers that run in slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from thinwire.errors import ConfigError
from thinwire.hosts.offload.spill import NUM_AHEAD
from thinwire.hosts.offload.tiling import tile as cut_into_tiles
from thinwire.layout.layers import layers_of
from thinwire.losses import cut_loss, loss_in_effect
from thinwire.methods.memory.residency import OFFLOAD, RECOMPUTE, RECOMPUTE_FROM_DISK
from thinwire.models.llama import Llama, LlamaConfig

# In which a forward may compute.
DTYPES = ("bf16", "fp32")


def recompute(model: nn.Module, slices: int = 1) -> int:
    """Make every layer keep only its input and recompute the rest in backward. Return the number of layers.

    slices: parts of its batch that a layer computes one after another, in forward and in backward; see `in_slices`.
    """
    layers = layers_of(model)
    for layer in layers:
        layer.forward = partial(in_slices, partial(checkpoint, layer.forward, use_reentrant=False), slices)
    if slices > 1:
        model.register_forward_pre_hook(_refuse_documents, with_kwargs=True)
    return len(layers)


def in_slices(forward: Callable[..., Any], num: int, *args: Any, **kwargs: Any) -> Any:
    """What a layer returns for a batch, computed for at most `num` parts of it in turn and put together.

    The layer's weights are used once, and backward ends with all parts of a layer before it begins with the layer
    below. args: the first is [batch, ...]. Of the others, and of `kwargs`, tensors of three or more dimensions whose
    first is the batch are cut too, and integers [batch, seq].
    """
    batch = len(args[0])
    num = min(num, batch)
    if num == 1:
        return forward(*args, **kwargs)
    head = args[0].shape[:2]

    def cut(given: Any, number: int) -> Any:
        if isinstance(given, tuple | list):
            return type(given)(cut(each, number) for each in given)
        if isinstance(given, dict):
            return {name: cut(each, number) for name, each in given.items()}
        if not isinstance(given, Tensor) or not given.dim() or len(given) != batch:
            return given
        is_of_tokens = given.shape == head and not given.is_floating_point()
        return given.tensor_split(num)[number] if given is args[0] or given.dim() > 2 or is_of_tokens else given

    return _joined([forward(*cut(args, number), **cut(kwargs, number)) for number in range(num)])


def _joined(parts: list[Any]) -> Any:
    """The outputs of all slices as those of one batch. What has no batch is that of the last slice."""
    if isinstance(parts[0], Tensor) and parts[0].dim():
        return torch.cat(parts)
    if isinstance(parts[0], tuple | list):
        return type(parts[0])(_joined(list(each)) for each in zip(*parts, strict=True))
    return parts[-1]


def _refuse_documents(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) > 2 or kwargs.get("documents") is not None:
        raise ConfigError("slices beside documents: their bounds are those of a whole batch; leave one of both out")


def kept_bytes(model: nn.Module, *inputs: Any, besides: Sequence[Tensor] = ()) -> int:
    """Bytes that a forward keeps for its backward besides weights; each storage counts once.

    model, inputs: may be tensors without memory, so that nothing is computed. besides: tensors that do not count.
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
    again = [layer for layer in layers_of(model) if getattr(vars(layer).get("forward"), "func", None) is in_slices]
    hooks = [layer.register_forward_pre_hook(pack_inputs) for layer in again]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    for hook in hooks:
        hook.remove()
    weights = {param.untyped_storage()._cdata for param in (*model.parameters(), *besides)}
    return sum(storage.nbytes() for key, storage in found.items() if key not in weights)


def kept_by(
    config: LlamaConfig, loss: str, batch: int, seq_len: int, dtype: str = "auto", *, recomputes: bool = False,
    tile: str | None = None,
) -> int:  # fmt: skip
    """What a micro-batch of a Llama keeps on a CPU, computed with its kernels on tensors without memory.

    Of one and of two layers, as all are alike.

    Args:
        loss: see `loss_in_effect`.
        dtype: "bf16", whose copies of weights are kept too; "fp32"; or "auto": the larger of both.
        recomputes: each layer keeps only its input.
        tile: see Residency.
    """
    if dtype not in DTYPES:
        return max(kept_by(config, loss, batch, seq_len, each, recomputes=recomputes, tile=tile) for each in DTYPES)
    given = loss, batch, seq_len, dtype
    one, two = (
        _kept_by_all(replace(config, num_hidden_layers=num), *given, recomputes=recomputes, tile=tile) for num in (1, 2)
    )
    return one + (config.num_hidden_layers - 1) * (two - one)


def kept_ways(
    config: LlamaConfig, loss: str, batch: int, seq_len: int, dtype: str = "auto", slices: int = 1,
    tile: str | None = None,
) -> dict[str, int]:  # fmt: skip
    """What `kept_by` says if activations are kept; with layers that are computed again, and one of them; and on a disk.

    Of those on a disk, two layers' are in memory; of inputs on a disk those of three layers, which are read ahead.
    "inputs" is what layers are given, all of it.

    slices: see `in_slices`. tile: see Residency.
    """
    whole = kept_by(config, loss, batch, seq_len, dtype, tile=tile)
    inputs = kept_by(config, loss, batch, seq_len, dtype, recomputes=True, tile=tile)
    largest = -(-batch // min(slices, batch))
    layer = whole * largest // (batch * max(1, config.num_hidden_layers))
    few = NUM_AHEAD + 1
    return {
        "keep": whole, RECOMPUTE: min(whole, inputs + layer), OFFLOAD: min(whole, 2 * layer), "inputs": inputs,
        RECOMPUTE_FROM_DISK: min(whole, inputs * few // max(few, config.num_hidden_layers + 1) + layer),
    }  # fmt: skip


def _kept_by_all(
    config: LlamaConfig, loss: str, batch: int, seq_len: int, dtype: str, *, recomputes: bool, tile: str | None
) -> int:
    if tile is not None:
        # Rows of an embedding are looked up by values, and there are none.
        config = replace(config, tie_word_embeddings=False)
    with FakeTensorMode():
        model, tokens = Llama(config), torch.zeros(batch, seq_len, dtype=torch.int64)
        if loss_in_effect(loss, tokens.numel(), config.vocab_size)[0] == "cut":
            cut_loss(model, model.lm_head)
        if tile is not None:
            cut_into_tiles(model, tile, tables=False, must=False)
        if recomputes:
            recompute(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            return kept_bytes(model, tokens, tokens)
