"""What a forward keeps for its backward: all activations, or only each layer's input. Layers that run in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.errors import ConfigError
from thinwire.layout.layers import layers_of
from thinwire.models.moe import MoE, check_parts

# The number of the part of a batch that a layer computes, and how many there are.
_PART: ContextVar[tuple[int, int]] = ContextVar("part", default=(0, 1))


def part_of(num: int) -> slice:
    """Which of a batch's `num` sequences a layer computes now: all of them, or those of a slice."""
    number, num_parts = _PART.get()
    before = [len(part) for part in torch.arange(num).tensor_split(num_parts)[: number + 1]]
    return slice(sum(before[:-1]), sum(before))


def part_number() -> int:
    """The number of the slice that a layer computes now; 0 without slices."""
    return _PART.get()[0]


@contextmanager
def _in_part(number: int, num: int) -> Iterator[None]:
    token = _PART.set((number, num))
    try:
        yield
    finally:
        _PART.reset(token)


def recompute(model: nn.Module, slices: int = 1) -> int:
    """Make every layer keep only its input and recompute the rest in backward. Return the number of layers.

    slices: parts of its batch that a layer computes one after another, in forward and in backward; see `in_slices`.
    """
    layers = layers_of(model)
    for layer in layers:
        mixtures = [module for module in layer.modules() if isinstance(module, MoE)]
        again = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=partial(_contexts, mixtures))
        layer.forward = partial(in_slices, again, slices, mixtures=mixtures)
    if slices > 1:
        model.register_forward_pre_hook(_refuse_whole_batches, with_kwargs=True)
    return len(layers)


def _contexts(mixtures: Sequence[MoE]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a layer's forward, and of the second one in the backward."""
    return nullcontext(), _as_before(mixtures, *_PART.get())


@contextmanager
def _as_before(mixtures: Sequence[MoE], number: int, num: int) -> Iterator[None]:
    """Leave the sums of the first forward: those of the second would hold what it computes until the next step.

    number, num: of the part that it computes.
    """
    before = [each.sums for each in mixtures]
    try:
        with _in_part(number, num):
            yield
    finally:
        for each, sums in zip(mixtures, before, strict=True):
            each.sums = sums


def in_slices(
    forward: Callable[..., Any], num: int, *args: Any, mixtures: Sequence[MoE] = (), **kwargs: Any
) -> Any:  # fmt: skip
    """What a layer returns for a batch, computed for at most `num` parts of it in turn and put together.

    The layer's weights are used once, and backward ends with all parts of a layer before it begins with the layer
    below. args: the first is [batch, ...]. Of the others, and of `kwargs`, tensors of three or more dimensions whose
    first is the batch are cut too, and integers [batch, seq]. mixtures: in the layer; the sums of their parts are
    added.
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

    outputs, sums = list[Any](), list[list[Tensor | None]]()
    for number in range(num):
        with _in_part(number, num):
            outputs.append(forward(*cut(args, number), **cut(kwargs, number)))
        sums.append([each.sums for each in mixtures])
    for each, of_parts in zip(mixtures, zip(*sums, strict=True), strict=True):
        noted = [part for part in of_parts if part is not None]
        each.sums = torch.stack(noted).sum(0) if noted else None
    return _joined(outputs)


def _joined(parts: list[Any]) -> Any:
    """The outputs of all slices as those of one batch. What has no batch is that of the last slice."""
    if isinstance(parts[0], Tensor) and parts[0].dim():
        return torch.cat(parts)
    if isinstance(parts[0], tuple | list):
        return type(parts[0])(_joined(list(each)) for each in zip(*parts, strict=True))
    return parts[-1]


def _refuse_whole_batches(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) > 2 or kwargs.get("documents") is not None:
        raise ConfigError("slices beside documents: their bounds are those of a whole batch; leave one of both out")
    check_parts(model)


class KeptStorages(NamedTuple):
    """Bytes that a forward keeps for its backward besides weights; each storage counts once.

    given: of them, what layers are given that are computed again.
    """

    bytes: int
    given: int


def kept_bytes(model: nn.Module, *inputs: Any, besides: Sequence[Tensor] = ()) -> int:
    """See `kept`, which runs the forward of these inputs.

    model, inputs: may be tensors without memory, so that nothing is computed. besides: tensors that do not count.
    """
    return kept(model, lambda: model(*inputs), besides)[0].bytes


def kept(model: nn.Module, forward: Callable[[], Any], besides: Sequence[Tensor] = ()) -> tuple[KeptStorages, Any]:
    """What a forward keeps, and what it returns. besides: tensors that do not count."""
    # Storages are held, so that no other takes the place of one that is gone.
    found: dict[int, torch.UntypedStorage] = {}
    given: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
        return tensor

    def pack_inputs(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        for tensor in inputs:
            # Foreign layers are given what they have not, too.
            if isinstance(tensor, Tensor):
                given.add(pack(tensor).untyped_storage()._cdata)

    # What is given to a layer that is computed again passes no hook of saved tensors.
    again = [layer for layer in layers_of(model) if getattr(vars(layer).get("forward"), "func", None) is in_slices]
    hooks = [layer.register_forward_pre_hook(pack_inputs) for layer in again]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    for hook in hooks:
        hook.remove()
    weights = {param.untyped_storage()._cdata for param in (*model.parameters(), *besides)}
    sizes = {key: storage.nbytes() for key, storage in found.items() if key not in weights}
    return KeptStorages(sum(sizes.values()), sum(size for key, size in sizes.items() if key in given)), output
