"""The tracer of placed models: it notes the context of each node, and refuses what a graph would silently leave out."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from thinwire import _compat
from thinwire.device import is_other_state, random_state, set_random_state
from thinwire.errors import ConfigError

Leaf = str | type[nn.Module]


@dataclass(frozen=True)
class Context:
    """Whether gradients are computed, and by type of device the dtype of torch.autocast; None: it is off."""

    has_grad: bool
    dtypes: Mapping[str, torch.dtype | None]

    @classmethod
    def now(cls) -> Context:
        return cls(torch.is_grad_enabled(), {kind: _autocast(kind) for kind in ("cpu", "cuda")})

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if not self.has_grad:
                stack.enter_context(torch.no_grad())
            for kind, dtype in self.dtypes.items():
                if _autocast(kind) != dtype:
                    stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
            yield


def _autocast(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class _Weight(fx.Proxy):
    """A parameter or buffer in a graph. What does not depend on its values is known while tracing."""

    def __init__(self, node: fx.Node, tracer: Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.shape, self.ndim, self.dtype, self.device = tensor.shape, tensor.ndim, tensor.dtype, tensor.device
        self.size, self.dim, self.numel = tensor.size, tensor.dim, tensor.numel
        self.is_cuda, self.layout, self.tensor = tensor.is_cuda, tensor.layout, tensor
        # What isinstance(..., nn.Parameter) reads.
        self._is_param = isinstance(tensor, nn.Parameter)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # A forward may ask by isinstance, and do something else.
        return type(self.tensor)

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[fx.Proxy]:
        return (self[row] for row in range(len(self)))  # type: ignore[index]


class _Input(fx.Proxy):
    """A tensor that the forward is given."""

    _is_param = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # A forward may ask by isinstance or torch.is_tensor. Other code of torch would go on to ask for values.
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        return fx.Proxy if asks.startswith("torch.") else Tensor


class Tracer(fx.Tracer):
    """Modules of torch.nn, and the stated ones, are one node each; so is a parameter or buffer, read at each call.

    Attributes:
        path: modules being traced.
        begun: the context in which tracing begins.
        contexts: of the nodes that are made in another one, by name.
        held: tensors that the forward makes of no traced tensor, by the target of the nodes that read them.
        fault: why a graph would do other things than the forward; None: it would not.
    """

    def __init__(self, leaves: Collection[Leaf]) -> None:
        super().__init__()
        self.types = tuple(leaf for leaf in leaves if not isinstance(leaf, str))
        self.names = {leaf for leaf in leaves if isinstance(leaf, str)}
        self.path: list[str] = []
        self.contexts: dict[str, Context] = {}
        self.held: dict[str, Any] = {}
        self.fault: str | None = None

    def traced(self, model: nn.Module, fixed: dict[str, Any], inputs: Collection[str]) -> fx.Graph:
        """The graph of a model, which stays as it was. Raises ConfigError for what a graph would leave out.

        fixed, inputs: arguments that are not tensors, with their values, and names of those that are.
        """
        self.inputs = inputs
        self.draws, self.hooks = Draws(), _compat.saved_tensors_hooks()
        self.tensors = [*model.named_parameters(), *model.named_buffers()]
        with kept(model) as attributes, torch.enable_grad(), _Eager(self):
            self.begun = Context.now()
            try:
                graph = self.trace(model, fixed)
                self.check()
            finally:
                self.draws.restore()
            targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
            self.held = {name: vars(model).pop(name) for name in targets & (vars(model).keys() - attributes.of(model))}
            for module, key in attributes.changed():
                self.path = [name] if (name := self.path_of_module(module)) else []
                self.refuse(f"changes its attribute {key!r}, which a placed forward does not: return what it keeps")
        if self.fault:
            # The forward has caught the error.
            raise ConfigError(self.fault)
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_stated = module_qualified_name in self.names or (bool(self.types) and isinstance(m, self.types))
        return is_stated or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.check()
        self.path.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.check()
        # After an error the path stays where it was.
        self.path.pop()
        return result

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = next((name for name, tensor in self.tensors if tensor is attr_val), None)
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy(
                "get_attr", name, (), {}, proxy_factory_fn=lambda node: _Weight(node, self, attr_val)
            )
        return parameter_proxy_cache[name]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Input(node, self) if node.op == "placeholder" and node.target in self.inputs else super().proxy(node)

    def create_arg(self, a: Any) -> Any:
        return a.node if isinstance(a, (_Weight, _Input)) else super().create_arg(a)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        self.check()
        node = super().create_node(kind, *args, **kwargs)
        if (now := Context.now()) != self.begun:
            self.contexts[node.name] = now
        return node

    def check(self) -> None:
        """Raise ConfigError for random numbers, or a context, that the graph would leave out."""
        if self.draws.are_other():
            self.refuse("draws a random number that no traced tensor is part of, or seeds a generator")
        if _compat.saved_tensors_hooks() != self.hooks:
            self.refuse("works under saved_tensors_hooks, as torch.utils.checkpoint does, which placed nodes do not")

    def refuse(self, what: str) -> None:
        kind = type(self.root.get_submodule(self.path[-1] if self.path else "")).__name__
        if self.path:
            who, near = f"module {self.path[-1]!r} ({kind})", f"leaves=[{self.path[-1]!r}], which places it whole"
        else:
            who, near = f"{kind}.forward", "move that into a module of its own, and name it in leaves=[...]"
        self.fault = self.fault or f"{who} {what}; nearest: {near}"
        raise ConfigError(self.fault)


class _Eager(_compat.DispatchMode):
    """Refuses operations that are computed while tracing, and would have another result at each call."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.names = {address: name for name, tensor in tracer.tensors if (address := _address(tensor))}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.tracer.refuse("draws a random number that no traced tensor is part of")
        found: list[Tensor] = []
        map_aggregate((args, kwargs or {}), lambda each: found.append(each) if isinstance(each, Tensor) else None)
        for name in (self.names[address] for each in found if (address := _address(each)) in self.names):
            self.tracer.refuse(f"reads or writes {name!r} other than as an attribute, such as by parameters()")
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> tuple[torch.device, int] | None:
    """Where a tensor's storage begins; None if it has no bytes."""
    address = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    return (tensor.device, address) if address else None


class Draws:
    """The states of the generators of torch, Python and numpy, as they are now."""

    def __init__(self) -> None:
        self.torch, self.others = random_state(), _other_states()

    def are_other(self) -> bool:
        """Whether numbers were drawn since."""
        python, numpy = _other_states()
        is_other = is_other_state(self.torch) or python != self.others[0]
        return is_other or (numpy is not None and _told(numpy) != _told(self.others[1]))

    def restore(self) -> None:
        set_random_state(self.torch)
        python, numpy = self.others
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


def _other_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _told(state: Any) -> Any:
    """A state of numpy as what can be compared."""
    return state and (state[1].tobytes(), *state[2:])


class _Attributes:
    """The attributes of all modules of a model, with what is in their lists, dictionaries, sets and generators."""

    def __init__(self, model: nn.Module) -> None:
        self.before = {module: dict(vars(module)) for module in model.modules()}
        self.inner = {
            id(value): copy(value)
            for own in self.before.values()
            for value in own.values()
            if type(value) in (list, dict, set, OrderedDict)
        }
        values = [value for own in self.before.values() for value in own.values()]
        self.generators = [(each, each.get_state()) for each in values if isinstance(each, torch.Generator)]

    def of(self, module: nn.Module) -> set[str]:
        return set(self.before[module])

    def changed(self) -> Iterator[tuple[nn.Module, str]]:
        """What is another one now, except what a cached_property keeps."""
        for module, before in self.before.items():
            now = vars(module)
            for key in [*before, *(key for key in now if key not in before)]:
                is_alike = key in now and key in before and self._are_alike(now[key], before[key])
                if not (is_alike or isinstance(getattr(type(module), key, None), cached_property)):
                    yield module, self._tensor(before, key) or key

    def _tensor(self, before: Mapping[str, Any], key: str) -> str | None:
        """The name of the buffer that is another one now, if any."""
        if key != "_buffers":
            return None
        was = self.inner.get(id(before[key]), {})
        return next((name for name, tensor in before[key].items() if was.get(name) is not tensor), None)

    def _are_alike(self, now: Any, before: Any) -> bool:
        inner = self.inner.get(id(before))
        if now is not before or inner is None:
            return _are_same(now, before)
        if isinstance(now, set):
            return bool(now == inner)
        pairs = (now.items(), inner.items()) if isinstance(now, dict) else (enumerate(now), enumerate(inner))
        return len(now) == len(inner) and all(
            a[0] == b[0] and _are_same(a[1], b[1]) for a, b in zip(*pairs, strict=True)
        )

    def restore(self) -> None:
        for generator, state in self.generators:
            generator.set_state(state)
        for module, before in self.before.items():
            for key in vars(module).keys() - before.keys():
                del vars(module)[key]
            vars(module).update(before)
            for value in before.values():
                inner = self.inner.get(id(value))
                if isinstance(value, list) and inner is not None:
                    value[:] = inner
                elif inner is not None:
                    value.clear()
                    value.update(inner)


def _are_same(a: Any, b: Any) -> bool:
    is_plain = isinstance(a, (bool, int, float, complex, str, bytes))
    return a is b or bool(is_plain and type(a) is type(b) and a == b)


@contextmanager
def kept(model: nn.Module) -> Iterator[_Attributes]:
    """Afterwards the attributes of all modules are as before; the values of tensors may not be."""
    attributes = _Attributes(model)
    try:
        yield attributes
    finally:
        attributes.restore()
