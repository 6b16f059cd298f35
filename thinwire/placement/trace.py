"""Traces a model with torch.fx: nodes are modules and functions, edges are the values between them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate, map_arg

from thinwire.errors import ConfigError, nearest
from thinwire.placement.tracer import Context, Leaf, Tracer

# What a tensor tells without its values.
SHAPE_METHODS = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "is_floating_point",
    "is_complex",
    "__len__",
}
SHAPE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "layout", "requires_grad"}
COMPUTE = ("call_module", "call_function", "call_method", "get_attr")


@dataclass(frozen=True)
class Traced:
    """A model's forward as nodes in order.

    Attributes:
        signature: of the forward.
        fixed: arguments that are not tensors, by name. The graph holds only for these values.
        kinds: shape and dtype of the tensors among the arguments, by name. Constants may depend on them.
        sources: the placeholder of each argument.
        nodes: those that compute.
        output: what the model returns, with nodes in it.
        changed: nodes that no longer write into their input.
        ambient: the context in which it was traced, which is that of a call.
        contexts: of nodes that run in another one, by name.
        held: tensors that the forward makes of no traced tensor, by the target of nodes.
        reads: modules that were asked while tracing whether they train, and what they said. The graph holds only then.
        other: the graph of the opposite mode, if it has the same nodes, which differ only in constants.
    """

    model: nn.Module
    signature: inspect.Signature
    fixed: Mapping[str, Any]
    kinds: Mapping[str, tuple[torch.Size, torch.dtype]]
    sources: Mapping[str, fx.Node]
    nodes: tuple[fx.Node, ...]
    output: Any
    changed: tuple[str, ...] = ()
    ambient: Context = field(default_factory=Context.now)
    contexts: Mapping[str, Context] = field(default_factory=dict)
    held: Mapping[str, Any] = field(default_factory=dict)
    reads: Mapping[nn.Module, bool] = field(default_factory=dict)
    other: Traced | None = None

    @cached_property
    def named(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.nodes}

    def now(self) -> Traced:
        """The graph for the modes in which modules are. Raises ConfigError if no graph was traced for them."""
        for one in (self, self.other):
            if one is not None and all(module.training == mode for module, mode in one.reads.items()):
                return one
        module, then = next((module, mode) for module, mode in self.reads.items() if module.training != mode)
        names = {each: name for name, each in self.model.named_modules()}
        name = names.get(module, "")
        told, leaf = (f"module {name!r}", f", leaves=[{name!r}]") if name else (f"the {type(module).__name__}", "")
        mode, before = ("training" if each else "evaluation" for each in (not then, then))
        raise ConfigError(
            f"{told} is in {mode}, was in {before} when the model was placed, and its forward depends on that: give "
            f"what differs a module of its own, such as nn.Dropout{leaf}, or place the model in {mode} for another "
            "placement"
        )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[fx.Node, Any]:
        """The arguments of a call, by placeholder.

        Raises ConfigError for fixed arguments and shapes that differ from the graph's, and for inputs that require a
        gradient where gradients are computed, and for another state of torch.autocast.
        """
        for kind, dtype in Context.now().dtypes.items():
            if dtype != self.ambient.dtypes[kind]:
                now, then = (
                    "off" if each is None else f"on with {each}" for each in (dtype, self.ambient.dtypes[kind])
                )
                raise ConfigError(
                    f"torch.autocast is {now} on {kind}, and was {then} when the model was placed: call `place` and "
                    "the model under the same torch.autocast"
                )
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in self.fixed.items():
            given = bound.arguments[name]
            if isinstance(given, Tensor) or given != value:
                raise ConfigError(f"{name}={_short(given)}: the placement was made for {name}={_short(value)}")
        for name, (shape, dtype) in self.kinds.items():
            given = bound.arguments[name]
            if not isinstance(given, Tensor) or (given.shape, given.dtype) != (shape, dtype):
                raise ConfigError(
                    f"{name}={_short(given)}: the placement was made for a tensor {list(shape)} of {dtype}; place "
                    "the model for inputs of these shapes"
                )
            if given.requires_grad and torch.is_grad_enabled():
                raise ConfigError(f"{name!r} requires a gradient, and none comes back for inputs: give it detached")
        return {node: bound.arguments[name] for name, node in self.sources.items()}

    def call(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
        """A node's result for its inputs' values."""
        target = str(node.target)
        if node.op == "get_attr":
            return self.held[target] if target in self.held else operator.attrgetter(target)(self.model)
        with self.contexts[node.name].entered() if node.name in self.contexts else nullcontext():
            return self._called(node, value_of)

    def _called(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
        args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
        if node.op == "call_module":
            return self.model.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def weights(self, node: fx.Node) -> list[Tensor]:
        """The parameters and buffers that a node reads."""
        if node.op == "get_attr":
            found = self.call(node, lambda each: each)
            return [found] if isinstance(found, Tensor) else []
        if node.op != "call_module":
            return []
        module = self.model.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]


def trace(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any], leaves: Collection[Leaf] = ()) -> Traced:
    """Trace a model's forward.

    inputs: of one call, by position or by name; omitted ones keep their defaults. Arguments that are not tensors are
    fixed.
    leaves: modules that stay one node, by name or class, besides those of torch.nn. Raises ConfigError that names a
    module that can't be traced, or a node that can't be planned.
    """
    _check_leaves(model, leaves)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"inputs do not fit {type(model).__name__}.forward{signature}: {error}") from None
    bound.apply_defaults()
    varied = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    open_ = [name for name, one in signature.parameters.items() if one.kind in varied]
    if any(bound.arguments[name] for name in open_):
        raise ConfigError(f"{type(model).__name__}.forward takes *{open_[0]}: give its arguments names of their own")
    fixed = {name: value for name, value in bound.arguments.items() if not isinstance(value, Tensor)}
    for name, value in fixed.items():
        if _has_tensor(value):
            raise ConfigError(f"{name!r} is a {type(value).__name__} with tensors: give each an argument of its own")
    kinds = {name: (v.shape, v.dtype) for name, v in bound.arguments.items() if isinstance(v, Tensor)}
    traced = replace(_traced(model, leaves, signature, fixed, open_), kinds=kinds)
    if not traced.reads:
        return traced
    other = _other(traced, leaves, open_)
    return replace(traced, other=other and replace(other, kinds=kinds))


def _has_tensor(value: Any) -> bool:
    found: list[bool] = []
    map_aggregate(value, lambda each: found.append(isinstance(each, Tensor)))
    return any(found)


def _traced(
    model: nn.Module, leaves: Collection[Leaf], signature: inspect.Signature, fixed: Mapping[str, Any],
    open_: Collection[str],
) -> Traced:  # fmt: skip
    tracer, closed = Tracer(leaves), {name: value for name, value in fixed.items() if name not in open_}
    try:
        with _recorded_modes() as reads:
            graph = tracer.traced(model, closed, signature.parameters.keys() - fixed.keys())
    except Exception as error:
        raise ConfigError(tracer.fault or _untraceable(model, tracer.path, error)) from None
    traced = _collected(model, signature, fixed, open_, graph, reads)
    return replace(traced, ambient=tracer.begun, contexts=tracer.contexts, held=tracer.held)


def _collected(
    model: nn.Module, signature: inspect.Signature, fixed: Mapping[str, Any], open_: Collection[str], graph: fx.Graph,
    reads: Mapping[nn.Module, bool],
) -> Traced:  # fmt: skip
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    names = [name for name in signature.parameters if name not in open_]
    sources = {name: node for name, node in zip(names, holders, strict=False) if name not in fixed}
    for node in holders:
        if node not in sources.values():
            # Only checks of the arguments that are fixed read it.
            for user in [user for user in node.users if user.op == "call_function"]:
                _erase(graph, user)
    nodes = tuple(node for node in graph.nodes if node.op in COMPUTE)
    (output,) = (node.args[0] for node in graph.nodes if node.op == "output")
    changed = tuple(node.name for node in nodes if _out_of_place(model, node, graph))
    return Traced(model, signature, fixed, {}, sources, nodes, output, changed, reads=dict(reads))


@contextmanager
def _recorded_modes() -> Iterator[dict[nn.Module, bool]]:
    """The modules that are asked inside whether they train, in whatever way, and what they say."""
    found: dict[nn.Module, bool] = {}

    def read(module: Any, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name == "training":
            found[module] = value
        return value

    nn.Module.__getattribute__ = read  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del nn.Module.__getattribute__


@contextmanager
def in_mode(modules: Iterable[nn.Module], training: bool) -> Iterator[None]:
    """Modules in one mode. Their `train` is not called, as it may do more."""
    before = {module: module.training for module in modules}
    try:
        for module in before:
            module.training = training
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def _other(traced: Traced, leaves: Collection[Leaf], open_: Collection[str]) -> Traced | None:
    """The graph of the opposite mode, if it can be traced and is alike."""
    model = traced.model
    try:
        with in_mode(model.modules(), not model.training):
            other = _traced(model, leaves, traced.signature, traced.fixed, open_)
    except ConfigError:
        return None
    return other if are_alike(traced, other) else None


def are_alike(a: Traced, b: Traced, fixed: Collection[str] = ()) -> bool:
    """Whether two graphs have the same nodes, which differ only in constants; and, if named in `fixed`, not at all."""

    def told(traced: Traced) -> Any:
        nodes = [
            (n.name, n.op, n.target, traced.contexts.get(n.name), *(each.name for each in n.all_input_nodes))
            for n in traced.nodes
        ]
        constants = [map_arg((n.args, n.kwargs), lambda each: each.name) for n in traced.nodes if n.name in fixed]
        shown: list[str] = []
        map_arg(traced.output, lambda each: shown.append(each.name))
        return nodes, constants, shown

    return bool(told(a) == told(b))


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def _out_of_place(model: nn.Module, node: fx.Node, graph: fx.Graph) -> bool:
    """Make a node not write into its input. Return whether it would have. Raises ConfigError if that is impossible."""
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    is_told = node.kwargs.get("inplace", False) is True or getattr(module, "inplace", False) is True
    name = str(node.target)
    is_method = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    is_item = node.op == "call_function" and _writes(node)
    if not (is_told or is_method or is_item):
        return False
    order = list(graph.nodes)
    later = [
        user for source in node.all_input_nodes[:1] for user in source.users if order.index(user) > order.index(node)
    ]
    if (is_method or is_item) and any(source.op == "get_attr" for source in node.all_input_nodes[:1]):
        target = str(node.all_input_nodes[0].target)
        raise ConfigError(
            f"{node.name!r} writes into {target!r}{_where(node)}, which a graph only reads: "
            "move that into a module of its own, and name it in leaves=[...]"
        )
    if is_method or is_item or later:
        raise ConfigError(
            f"{node.name!r} writes into its input{_where(node)}, which may lie on another device: compute a new "
            "tensor, such as x = x + y for x.add_(y)"
        )
    if module is not None:
        module.inplace = False  # type: ignore[assignment]
    else:
        node.kwargs = {**node.kwargs, "inplace": False}
    return True


def _writes(node: fx.Node) -> bool:
    """Whether a function writes into an argument: torch.relu_, out=, and those of `operator`, where and_ does not."""
    if node.target in (operator.setitem, operator.iadd, operator.imul) or node.kwargs.get("out") is not None:
        return True
    name = getattr(node.target, "__name__", "").split(".")[0]
    is_operator = getattr(operator, name, None) is node.target
    return name.endswith("_") and not name.endswith("__") and not is_operator


def _where(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    inner = [path for path, _ in stack.values() if path]
    return f" in module {inner[-1]!r}" if inner else ""


def _check_leaves(model: nn.Module, leaves: Collection[Leaf]) -> None:
    if isinstance(leaves, (str, type)):
        raise ConfigError(f"leaves {leaves!r} must be a list, such as [{leaves!r}]")
    names = dict(model.named_modules())
    for leaf in leaves:
        if isinstance(leaf, str) and leaf not in names:
            raise ConfigError(
                f"leaf {leaf!r} is no module of {type(model).__name__}{nearest(leaf, filter(None, names))}"
            )


def stated_groups(traced: Traced, groups: Collection[Collection[str]]) -> list[list[str]]:
    """The nodes of each group of names of modules or nodes. Raises ConfigError for a name without a node."""
    paths = {node.name: {node.name, *_modules_of(node)} for node in traced.nodes}
    known = sorted(set().union(*paths.values()))
    found = []
    for group in groups:
        if isinstance(group, str):
            raise ConfigError(
                f"groups: {group!r} must be a list of names that share a rank, such as [[{group!r}, ...]]"
            )
        for name in group:
            if name not in known:
                raise ConfigError(f"groups: {name!r} is no module or node that computes{nearest(name, known)}")
        found.append([name for name, own in paths.items() if own & set(group)])
    return found


def _modules_of(node: fx.Node) -> set[str]:
    """The names of the modules in whose forward a node is, and of its own."""
    stack = node.meta.get("nn_module_stack") or {}
    own = {path for path, _ in stack.values() if path}
    return {*own, str(node.target)} if node.op == "call_module" else own


def _untraceable(model: nn.Module, path: Sequence[str], error: Exception) -> str:
    cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if not path:
        return (
            f"torch.fx can't trace {type(model).__name__}.forward: {cause}; move what it can't follow into a module of "
            "its own, and name that in leaves=[...]: it is placed whole"
        )
    module = model.get_submodule(path[-1])
    return (
        f"torch.fx can't trace module {path[-1]!r} ({type(module).__name__}): {cause}; mark it as a leaf, which is "
        f"placed whole: leaves=[{path[-1]!r}], or leaves=[{type(module).__name__}] for all of its class"
    )


def target_name(node: fx.Node) -> str:
    """What a node does, in the same words in all processes: the text of a function may hold its address."""
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", type(node.target).__qualname__)
    return f"{getattr(node.target, '__module__', None)}.{name}"


def is_of_shapes(node: fx.Node) -> bool:
    """Whether a node reads a property of a tensor that does not depend on its values."""
    if node.op == "call_method":
        return str(node.target) in SHAPE_METHODS
    if node.target is getattr:
        return node.args[1] in SHAPE_ATTRIBUTES
    return node.target in (len, torch.numel, torch.is_floating_point)


def _short(value: Any) -> str:
    return f"a tensor {list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)
