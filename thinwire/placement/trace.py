"""Traces a model with torch.fx: nodes are modules and functions, edges are the values between them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from thinwire.errors import ConfigError, nearest

Leaf = str | type[nn.Module]
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


class _Tracer(fx.Tracer):
    """A tracer for which modules of torch.nn, and the stated ones, are one node each. path: modules being traced."""

    def __init__(self, leaves: Collection[Leaf]) -> None:
        super().__init__()
        self.types = tuple(leaf for leaf in leaves if not isinstance(leaf, str))
        self.names = {leaf for leaf in leaves if isinstance(leaf, str)}
        self.path: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_stated = module_qualified_name in self.names or (bool(self.types) and isinstance(m, self.types))
        return is_stated or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.path.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        # After an error the path stays where it was.
        self.path.pop()
        return result


@dataclass(frozen=True)
class Traced:
    """A model's forward as nodes in order.

    Attributes:
        signature: of the forward.
        fixed: arguments that are not tensors, by name. The graph holds only for these values.
        sources: the placeholder of each argument.
        nodes: those that compute.
        output: what the model returns, with nodes in it.
        changed: nodes that no longer write into their input.
        mode: training or not, if a function received it while tracing; None: only modules depend on it.
    """

    model: nn.Module
    signature: inspect.Signature
    fixed: Mapping[str, Any]
    sources: Mapping[str, fx.Node]
    nodes: tuple[fx.Node, ...]
    output: Any
    changed: tuple[str, ...] = ()
    mode: bool | None = None

    @property
    def named(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.nodes}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[fx.Node, Any]:
        """The arguments of a call, by placeholder. Raises ConfigError if fixed arguments differ from the graph's."""
        if self.mode is not None and self.mode != self.model.training:
            now, then = ("training" if mode else "evaluation" for mode in (self.model.training, self.mode))
            raise ConfigError(
                f"the model is in {now} and was traced in {then}, by which one of its functions is fixed: use modules, "
                "such as nn.Dropout, in place of functions with training="
            )
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in self.fixed.items():
            given = bound.arguments[name]
            if isinstance(given, Tensor) or given != value:
                raise ConfigError(f"{name}={_short(given)}: the placement was made for {name}={_short(value)}")
        return {node: bound.arguments[name] for name, node in self.sources.items()}

    def call(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
        """A node's result for its inputs' values."""
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.model)
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
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    open_ = [name for name, one in signature.parameters.items() if one.kind in kinds]
    if any(bound.arguments[name] for name in open_):
        raise ConfigError(f"{type(model).__name__}.forward takes *{open_[0]}: give its arguments names of their own")
    fixed = {name: value for name, value in bound.arguments.items() if not isinstance(value, Tensor)}
    if grad := next((n for n, v in bound.arguments.items() if isinstance(v, Tensor) and v.requires_grad), None):
        raise ConfigError(f"{grad!r} requires a gradient, and none comes back for inputs: give it detached")
    tracer = _Tracer(leaves)
    try:
        graph = tracer.trace(model, concrete_args={name: value for name, value in fixed.items() if name not in open_})
    except Exception as error:
        raise ConfigError(_untraceable(model, tracer.path, error)) from None
    return _collected(model, signature, fixed, open_, graph)


def _collected(
    model: nn.Module, signature: inspect.Signature, fixed: dict[str, Any], open_: list[str], graph: fx.Graph
) -> Traced:
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
    asks = any("training" in node.kwargs for node in nodes) or _reads_mode(model, nodes)
    mode = model.training if asks else None
    return Traced(model, signature, fixed, sources, nodes, output, changed, mode)


def _reads_mode(model: nn.Module, nodes: Sequence[fx.Node]) -> bool:
    """Whether a forward that was traced, and is no node itself, reads whether its module trains."""
    leaves = tuple(f"{node.target}." for node in nodes if node.op == "call_module")
    traced = (type(module).forward for name, module in model.named_modules() if not f"{name}.".startswith(leaves))
    return any("training" in forward.__code__.co_names for forward in traced if hasattr(forward, "__code__"))


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
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
