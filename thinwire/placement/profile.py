"""Measures each node of a traced model: seconds of its forward and backward, and bytes of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn

from thinwire import _compat
from thinwire.device import is_other_state, random_state, wait_for
from thinwire.errors import ConfigError, nearest
from thinwire.placement.trace import Traced, in_mode, is_of_shapes
from thinwire.placement.tracer import Draws, kept

NUM_ROUNDS, NUM_WARMUPS = 20, 2
# (forward, backward) seconds by the name of a node.
Seconds = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Size:
    """The result of a node, and its memory.

    Attributes:
        shape, dtype: of a tensor; None: the node returns several.
        needs_grad: whether it has a gradient.
        new_bytes: memory that it does not share with earlier tensors; 0 for a view.
        saved_bytes: additional memory that a backward needs.
        temporary_bytes: additional memory while it runs.
    """

    shape: torch.Size | None
    dtype: torch.dtype | None
    needs_grad: bool
    new_bytes: int
    saved_bytes: int
    temporary_bytes: int


@dataclass(frozen=True)
class Profile:
    """The costs of nodes.

    constants: values of nodes that depend on shapes alone, and are not computed again. draws: nodes that draw random
    numbers, in training or in evaluation.
    """

    sizes: Mapping[str, Size]
    seconds: Seconds
    constants: Mapping[str, Any]
    draws: frozenset[str] = frozenset()


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for each in value for tensor in tensors_of(each)] if isinstance(value, (tuple, list)) else []


def mapped(value: Any, function: Callable[[Any], Any], kind: type | tuple[type, ...] = Tensor) -> Any:
    """The value, with `function` applied to each part of type `kind`."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(each, function, kind) for key, each in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        parts = [mapped(each, function, kind) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class _Storages:
    """Storages that have been seen. They are kept alive, so that their addresses are not used again."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._seen: dict[int, torch.UntypedStorage] = {}
        self.new_bytes(tensors)

    def new_bytes(self, tensors: Iterable[Tensor], *, keeps: bool = True) -> int:
        """Bytes of the tensors' storages that were not seen before. keeps: mark them as seen."""
        storages = {storage.data_ptr(): storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}
        new = {address: storage for address, storage in storages.items() if address not in self._seen}
        if keeps:
            self._seen |= new
        return sum(storage.nbytes() for storage in new.values())


class _Made(_compat.DispatchMode):
    """Records the tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += tensors_of(result)
        return result


class _Rounds:
    """Runs a traced model node by node; each node's inputs are detached."""

    def __init__(self, traced: Traced, inputs: Mapping[fx.Node, Any]) -> None:
        self.traced = traced
        self.values: dict[fx.Node, Any] = dict(inputs)
        self.needs_grad: dict[fx.Node, bool] = dict.fromkeys(inputs, False)

    def cut(self, node: fx.Node) -> Callable[[fx.Node], Any]:
        """The inputs of a node, detached, with gradients of their own."""

        def leaf(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor

        own: dict[fx.Node, Any] = {}
        for source in node.all_input_nodes:
            own[source] = mapped(self.values[source], leaf if self.needs_grad.get(source) else Tensor.detach)
        self.leaves = [tensor for value in own.values() for tensor in tensors_of(value) if tensor.requires_grad]
        return own.__getitem__


def profile(
    traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], *, seconds: Seconds | None = None,
    training: bool = True, num_rounds: int = NUM_ROUNDS,
) -> Profile:  # fmt: skip
    """Sizes from one pass, and seconds as the median of `num_rounds` passes, after two passes to warm up.

    seconds: known times, by the name of a node; nothing is timed then. Attributes of modules, buffers and random states
    are restored. Raises ConfigError for a Python number that depends on a tensor's values, and for `seconds` that lack
    a node.
    """
    inputs = traced.bind(args, kwargs)
    devices = [parameter.device for parameter in traced.model.parameters() if parameter.is_cuda]
    buffers = [(buffer, buffer.clone()) for buffer in traced.model.buffers()]
    draws_before = Draws()
    try:
        with (
            torch.random.fork_rng(sorted({device.index for device in devices})),
            torch.set_grad_enabled(training),
            kept(traced.model),
        ):
            sizes, constants, draws = _sizes(traced, inputs)
            computed = [node for node in traced.nodes if node.name not in constants]
            if seconds is None:
                seconds = _timed(traced, inputs, computed, constants, num_rounds)
    finally:
        draws_before.restore()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    names = [node.name for node in computed]
    if missing := [name for name in names if name not in seconds]:
        raise ConfigError(f"stated seconds lack the node {missing[0]!r}: the graph has {', '.join(names)}")
    if unknown := [name for name in seconds if name not in traced.named]:
        raise ConfigError(f"stated seconds of {unknown[0]!r}: no node of the graph{nearest(unknown[0], names)}")
    return Profile(sizes, {name: seconds[name] for name in names}, constants, frozenset(draws))


def _sizes(traced: Traced, inputs: Mapping[fx.Node, Any]) -> tuple[dict[str, Size], dict[str, Any], set[str]]:
    rounds, sizes, constants = _Rounds(traced, inputs), dict[str, Size](), dict[str, Any]()
    draws = set[str]()
    state = [*traced.model.parameters(), *traced.model.buffers(), *tensors_of(list(inputs.values()))]
    seen = _Storages(state)
    for node in traced.nodes:
        saved: list[Tensor] = []

        def pack(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor.detach())
            return tensor

        value_of, before = rounds.cut(node), random_state()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _Made() as made:
            value = _first_call(traced, node, value_of)
        if is_other_state(before) or _draws_otherwise(traced, node, value_of):
            draws.add(node.name)
        found = tensors_of(value)
        if not found:
            _check_constant(node, constants)
            constants[node.name] = rounds.values[node] = value
            continue
        rounds.needs_grad[node] = any(tensor.requires_grad for tensor in found)
        rounds.values[node] = mapped(value, Tensor.detach)
        new, more = seen.new_bytes(found), seen.new_bytes(saved)
        one = value if isinstance(value, Tensor) else None
        sizes[node.name] = Size(
            None if one is None else one.shape, None if one is None else one.dtype, rounds.needs_grad[node],
            new, more, seen.new_bytes(made.tensors, keeps=False),
        )  # fmt: skip
    return sizes, constants, draws


def _first_call(traced: Traced, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """A node's result. Raises ConfigError, with the node's name, for inputs that it can't take."""
    try:
        return traced.call(node, value_of)
    except Exception as error:
        given = [value_of(source) for source in node.all_input_nodes]
        told = ", ".join(f"{list(each.shape)} of {each.dtype}" for each in tensors_of(given))
        what = f"node {node.name!r}" + (f" (module {str(node.target)!r})" if node.op == "call_module" else "")
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{what} fails for tensors {told}: {cause}; nearest: inputs of the shapes and types that the model takes"
        ) from error


def _draws_otherwise(traced: Traced, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> bool:
    """Whether a node draws random numbers in the opposite mode."""
    if node.op != "call_module" and traced.other is None:
        return False
    before, other = random_state(), traced.other or traced
    own = {each.name: each for each in [*traced.sources.values(), *traced.nodes]}
    module = traced.model.get_submodule(str(node.target)) if node.op == "call_module" else None
    modules = [] if module is None else list(module.modules())
    # Some can't be called in it: a BatchNorm in training refuses a batch of one.
    with torch.no_grad(), in_mode(modules, module is not None and not module.training), suppress(Exception):
        other.call(other.named[node.name], lambda each: value_of(own[each.name]))
    return is_other_state(before)


def _check_constant(node: fx.Node, constants: Mapping[str, Any]) -> None:
    sources = [source for source in node.all_input_nodes if source.name not in constants]
    if sources and not is_of_shapes(node):
        raise ConfigError(
            f"node {node.name!r} makes a tensor of {sources[0].name!r} into a number, and what depends on values can't "
            "be planned: move it into a module of its own, and name that in leaves=[...]"
        )


def _timed(
    traced: Traced, inputs: Mapping[fx.Node, Any], nodes: Sequence[fx.Node], constants: Mapping[str, Any], num: int
) -> Seconds:
    found: dict[str, list[tuple[float, float]]] = {node.name: [] for node in nodes}
    for _ in range(NUM_WARMUPS + num):
        rounds = _Rounds(traced, inputs)
        rounds.values |= {traced.named[name]: value for name, value in constants.items()}
        for node in nodes:
            value_of = rounds.cut(node)
            start_s = _now(traced.model)
            value = traced.call(node, value_of)
            forward_s, backward_s = _now(traced.model) - start_s, 0.0
            tensors = [tensor for tensor in tensors_of(value) if tensor.requires_grad]
            if tensors:
                weights = [each for each in traced.weights(node) if each.requires_grad]
                gradients = [torch.ones_like(tensor) for tensor in tensors]
                start_s = _now(traced.model)
                with _compat.without_hooks(weights):
                    torch.autograd.grad(tensors, [*rounds.leaves, *weights], gradients, allow_unused=True)
                backward_s = _now(traced.model) - start_s
            found[node.name].append((forward_s, backward_s))
            rounds.needs_grad[node] = bool(tensors)
            rounds.values[node] = mapped(value, Tensor.detach)
    return {
        name: (median(pair[0] for pair in pairs[NUM_WARMUPS:]), median(pair[1] for pair in pairs[NUM_WARMUPS:]))
        for name, pairs in found.items()
    }


def _now(model: nn.Module) -> float:
    for place in {parameter.device for parameter in model.parameters()}:
        wait_for(place)
    return time.perf_counter()
