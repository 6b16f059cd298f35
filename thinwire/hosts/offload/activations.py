"""What a forward keeps for its backward: all activations, or only each layer's input. Layers that run in slices."""

from __future__ import annotations

import copy
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
from thinwire.models.hf import HFCausalLM
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
            # Foreign layers are given what they have not, too.
            if isinstance(tensor, Tensor):
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


def kept_of(
    model: nn.Module, loss: str, batch: int, seq_len: int, dtype: str = "auto", slices: int = 1, tile: str | None = None
) -> dict[str, int] | None:
    """What `kept_ways` says of a model on the device meta; None: it is not known, as of mixtures of experts.

    Known are ours, and those of transformers whose forward asks for no values.
    """
    given = loss, batch, seq_len, dtype, slices, tile
    if type(model) is Llama:
        return kept_ways(model.config, *given)
    try:
        return kept_ways(model, *given) if isinstance(model, HFCausalLM) else None
    except Exception:
        # Each foreign model fails in a way of its own on tensors without values.
        return None


def kept_by(
    of: LlamaConfig | HFCausalLM, loss: str, batch: int, seq_len: int, dtype: str = "auto", *, recomputes: bool = False,
    tile: str | None = None,
) -> int:  # fmt: skip
    """What a micro-batch keeps on a CPU, computed with its kernels on tensors without memory.

    Of one and of two layers, if all are alike.

    Args:
        of: the sizes of a Llama, or a model of transformers on the device meta.
        loss: see `loss_in_effect`.
        dtype: "bf16", whose copies of weights are kept too; "fp32"; or "auto": the larger of both.
        recomputes: each layer keeps only its input.
        tile: see Residency.
    """
    if dtype not in DTYPES:
        return max(kept_by(of, loss, batch, seq_len, each, recomputes=recomputes, tile=tile) for each in DTYPES)
    given = loss, batch, seq_len, dtype
    if isinstance(of, HFCausalLM) and not _are_alike(layers_of(of)):
        return _kept_by_all(of, None, *given, recomputes=recomputes, tile=tile)
    one, two = (_kept_by_all(of, num, *given, recomputes=recomputes, tile=tile) for num in (1, 2))
    return one + (_num_layers(of) - 1) * (two - one)


def kept_ways(
    of: LlamaConfig | HFCausalLM, loss: str, batch: int, seq_len: int, dtype: str = "auto", slices: int = 1,
    tile: str | None = None,
) -> dict[str, int]:  # fmt: skip
    """What `kept_by` says if activations are kept; with layers that are computed again, and one of them; and on a disk.

    Of those on a disk, two layers' are in memory; of inputs on a disk those of three layers, which are read ahead.
    "inputs" is what layers are given, all of it.

    slices: see `in_slices`. tile: see Residency.
    """
    whole = kept_by(of, loss, batch, seq_len, dtype, tile=tile)
    inputs = kept_by(of, loss, batch, seq_len, dtype, recomputes=True, tile=tile)
    largest = -(-batch // min(slices, batch))
    layer = whole * largest // (batch * max(1, _num_layers(of)))
    return kept_where(whole, inputs, layer, _num_layers(of))


def kept_where(whole: int, inputs: int, layer: int, num_layers: int) -> dict[str, int]:
    """Bytes in memory of a micro-batch's activations, by what becomes of them; see `kept_ways`.

    whole: all of them. inputs: what layers are given. layer: of one layer.
    """
    few = NUM_AHEAD + 1
    return {
        "keep": whole, RECOMPUTE: min(whole, inputs + layer), OFFLOAD: min(whole, 2 * layer), "inputs": inputs,
        RECOMPUTE_FROM_DISK: min(whole, inputs * few // max(few, num_layers + 1) + layer),
    }  # fmt: skip


def vocabulary_of(model: nn.Module) -> int | None:
    """Words of a model's head; None: not known."""
    if isinstance(model, HFCausalLM):
        return int(model.model.config.vocab_size)
    return model.config.vocab_size if isinstance(model, Llama) else None


def _num_layers(of: LlamaConfig | HFCausalLM) -> int:
    return of.num_hidden_layers if isinstance(of, LlamaConfig) else len(layers_of(of))


def _are_alike(layers: Sequence[nn.Module]) -> bool:
    """Whether one or two of the layers tell of all."""
    shapes = {(type(layer), *((name, param.shape) for name, param in layer.named_parameters())) for layer in layers}
    return len(shapes) == 1


def _kept_by_all(
    of: LlamaConfig | HFCausalLM, num_layers: int | None, loss: str, batch: int, seq_len: int, dtype: str, *,
    recomputes: bool, tile: str | None,
) -> int:  # fmt: skip
    """num_layers: of how many layers; None: all."""
    # Parameters on meta are no fake tensors, and are copied before there are any.
    found: nn.Module | None = None if isinstance(of, LlamaConfig) else copy.deepcopy(of)
    with FakeTensorMode():
        if isinstance(of, LlamaConfig):
            # Rows of an embedding are looked up by values, and there are none.
            ties = of.tie_word_embeddings and tile is None
            found = Llama(replace(of, num_hidden_layers=num_layers or 0, tie_word_embeddings=ties))
        assert found is not None
        _on_cpu(found, num_layers)
        tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
        if loss_in_effect(loss, tokens.numel(), vocabulary_of(found) or 0)[0] == "cut":
            cut_loss(found, found.lm_head if isinstance(found, Llama) else None)
        if tile is not None:
            cut_into_tiles(found, tile, tables=False, must=False)
        if recomputes:
            recompute(found)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            return kept_bytes(found, tokens, tokens)


def _on_cpu(model: nn.Module, num_layers: int | None) -> None:
    """Make parameters and buffers on meta fake tensors of a CPU, and leave so many layers of them."""
    for parent in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        if num_layers is not None and layers_of(model)[:1] == list(parent)[:1]:
            del parent[num_layers:]
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                if param not in made:
                    values = torch.empty(param.shape, dtype=torch.float32)
                    made[param] = nn.Parameter(values, requires_grad=param.requires_grad)
                module._parameters[name] = made[param]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
