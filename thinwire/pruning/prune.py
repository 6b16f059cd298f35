"""Prunes a model layer by layer. A layer's inputs are measured after the layers before it have been pruned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from thinwire.codecs.random import named_seed, uniform
from thinwire.errors import ConfigError
from thinwire.hosts.ranks import Spread, spread_over
from thinwire.pruning.curvature import gradients, in_groups, operate
from thinwire.pruning.masks import check, check_width, mask_of, num_removed, scores

# Parts of a layer that choose experts.
ROUTERS = {"gate", "router", "shared_expert_gate"}


@dataclass
class Pruned:
    """The result of pruning. masks: by parameter, True where a weight stays. unused: experts without a token."""

    masks: dict[str, Tensor] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    @property
    def sparsity(self) -> float:
        """The share of zeros in the pruned matrices."""
        kept = sum(int(mask.sum()) for mask in self.masks.values())
        return 1 - kept / max(1, sum(mask.numel() for mask in self.masks.values()))


@dataclass(frozen=True)
class Target:
    """A matrix to prune, or one for each expert. squares: of its inputs, summed. is_transposed: [experts, in, out]."""

    name: str
    weight: Tensor
    squares: Tensor
    is_transposed: bool = False

    def matrices(self) -> Tensor:
        """The weights as [..., out, in]."""
        return self.weight.data.transpose(-1, -2) if self.is_transposed else self.weight.data


@torch.no_grad()
def prune(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    sparsity: float = 0.5,
    method: str = "moe-pruner",
    pattern: str = "rows",
    seed: int = 0,
    rounds: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Pruned:
    """Set weights of all layers' matrices and experts to zero, in place. Routers, embeddings and the output layer stay.

    The batches pass the model once, and each layer twice: before it is pruned, to measure its inputs, and afterwards.
    If torch.distributed is initialised, each rank gives batches of its own, and the sums of squares are added over
    ranks: all get the masks of a single process. The collectives block. Experts that are spread over ranks become
    whole on each of them, one layer at a time, and then each rank keeps its part; masks are those of whole experts.
    Such ranks need equally many batches. Prune before the optimizer is made: it may hold other copies of the weights.

    Args:
        model: a model of thinwire, or a causal LM of transformers 5.
        batches: tokens, int64 [batch, seq] each.
        sparsity: share of each row that becomes zero.
        method: moe-pruner, wanda (all gates 1), magnitude (all norms 1), random; obs: by the gradients of each
            sequence's loss, behind the layers that are pruned already, see `surgery`; in one process.
        pattern: rows, or 2:4.
        seed: of `random`.
        rounds: of obs: how often the gradients of a layer are measured, while its zeros grow to the share.
        group: the ranks; None: all.

    Raises ConfigError for a model or options that don't allow pruning. Source: MoE-Pruner, algorithm 1.
    """
    check(method, pattern, sparsity, rounds)
    layers = layers_of(model)
    if any(is_parametrized(module) for module in model.modules()):
        raise ConfigError(
            "the model is pruned already, and its kept values are its parameters; nearest: thinwire prune of its folder"
        )
    many = dist.is_available() and dist.is_initialized()
    if method == "obs" and many and dist.get_world_size(group) > 1:
        raise ConfigError("--method obs: gradients are those of one process; nearest: wanda, or one process")
    batches, spread = list(batches), spread_over(model)
    if spread is not None:
        check_equally_many(spread, len(batches))
    check_targets(layers, pattern, sparsity, {} if spread is None else spread.shapes)
    done = Pruned()
    with evaluating(model):
        inputs, calls = first_inputs(model, layers, batches)
        for number, (prefix, layer) in enumerate(layers):
            with nullcontext() if spread is None else spread.whole(layer):
                with ExitStack() as hooks:
                    targets = list(watched(layer, prefix, hooks, is_gated=method == "moe-pruner"))
                    for x, call in zip(inputs, calls, strict=True):
                        call.run(layer, number, x)
                if many:
                    for squares in {id(target.squares): target.squares for target in targets}.values():
                        dist.all_reduce(squares, group=group)
                if method == "obs":
                    for number_of_round in range(1, rounds + 1):
                        # What stays shrinks by the same factor in each.
                        share = (
                            1 - (1 - sparsity) ** (number_of_round / rounds) if number_of_round < rounds else sparsity
                        )
                        prune_by_curvature(model, targets, batches, done, share, pattern)
                else:
                    for target in targets:
                        prune_one(target, done, sparsity, method, pattern, seed)
                if number < len(layers) - 1:
                    # Nothing reads what the last layer returns.
                    inputs = [call.run(layer, number, x) for x, call in zip(inputs, calls, strict=True)]
    return done


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in evaluation."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def check_targets(
    layers: list[tuple[str, nn.Module]], pattern: str, sparsity: float, shapes: Mapping[str, torch.Size]
) -> None:
    """Raise ConfigError for layers that can't be pruned, before any is changed. shapes: of what lies in parts."""
    widest = 0
    for prefix, layer in layers:
        with ExitStack() as hooks:
            for target in watched(layer, prefix, hooks, is_gated=False):
                shape = shapes.get(target.name, target.weight.shape)
                width = shape[-2 if target.is_transposed else -1]
                check_width(target.name, width, pattern)
                widest = max(widest, width)
    if widest and not num_removed(widest, sparsity):
        rule = f"removes no weight, since the longest rows have {widest}"
        # Rounded up, so that it is valid itself.
        raise ConfigError(f"--sparsity {sparsity:g}: {rule}; nearest: {math.ceil(1e7 / widest) / 1e7}")


def check_equally_many(ranks: Spread, num_batches: int) -> None:
    """Raise ConfigError, on all ranks that share experts, for unequal numbers of batches. A collective."""
    every = ranks.comm.wait(ranks.comm.all_gather_exact(torch.tensor([num_batches]))).flatten().tolist()
    if len(set(every)) > 1:
        raise ConfigError(
            f"ranks that share experts give {', '.join(map(str, every))} batches to prune by: all call the model "
            f"equally often; nearest: {min(every)} each"
        )


def prune_one(target: Target, done: Pruned, sparsity: float, method: str, pattern: str, seed: int) -> None:
    """Choose the weights of one target that stay, and set the others to zero."""
    matrices, norms = target.matrices(), target.squares.sqrt()
    if method == "random":
        drawn = uniform(named_seed(seed, target.name), 0, matrices.numel())
        score = drawn.view(matrices.shape).to(matrices.device)
    else:
        score = scores(matrices, torch.ones_like(norms) if method == "magnitude" else norms)
    if norms.ndim > 1 and method in ("moe-pruner", "wanda"):
        done.unused += [f"{target.name}[{expert}]" for expert in (norms.amax(-1) == 0).nonzero().flatten().tolist()]
    mask = mask_of(score, pattern, sparsity)
    mask = mask.transpose(-1, -2).contiguous() if target.is_transposed else mask
    target.weight.mul_(mask)
    done.masks[target.name] = mask


def prune_by_curvature(
    model: nn.Module, targets: list[Target], batches: list[Tensor], done: Pruned, sparsity: float, pattern: str
) -> None:
    """Choose by gradients what stays of a layer's targets, which makes up for the rest.

    Gradients of as many rows as fit are in memory; they are those before any of the layer's weights changes.
    """
    flat = [target.matrices().flatten(0, -2) for target in targets]
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in targets]
    for group in in_groups([rows.shape for rows in flat], sum(map(len, batches))):
        parts = [partial(rows_of, targets[number], rows) for number, rows in group]
        measured = gradients(model, [targets[number].weight for number, _ in group], batches, parts)
        for (number, rows), (grads, mean_square) in zip(group, measured, strict=True):
            found[number].append(
                operate(flat[number][rows], grads, mean_square, lambda score: mask_of(score, pattern, sparsity))
            )
    for target, pieces in zip(targets, found, strict=True):
        matrices = target.matrices()
        stays, values = (torch.cat(each).view(matrices.shape) for each in zip(*pieces, strict=True))
        matrices.copy_(values)
        done.masks[target.name] = stays.transpose(-1, -2).contiguous() if target.is_transposed else stays


def rows_of(target: Target, rows: slice, grad: Tensor) -> Tensor:
    """Rows of a target's matrices, of its gradient, [rows, in]."""
    return (grad.transpose(-1, -2) if target.is_transposed else grad).flatten(0, -2)[rows]


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model's layers with their names. Raises ConfigError if it has no list of layers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            return [(f"{name}.{number}", layer) for number, layer in enumerate(module)]
    raise ConfigError(f"{type(model).__name__} has no list of layers to prune")


@dataclass
class Call:
    """What a batch's forward passes to each layer besides its input."""

    given: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def run(self, layer: nn.Module, number: int, x: Tensor) -> Tensor:
        """The layer's output for an input."""
        args, kwargs = self.given[number]
        found = layer(x, *args, **kwargs)
        return found[0] if isinstance(found, tuple) else found


class Noted(Exception):
    """Ends a forward: all that it passes to the layers is known."""


def first_inputs(
    model: nn.Module, layers: list[tuple[str, nn.Module]], batches: Iterable[Tensor]
) -> tuple[list[Tensor], list[Call]]:
    """The first layer's inputs for all batches, and the other arguments of each layer."""
    inputs: list[Tensor] = []
    calls: list[Call] = []

    def note(number: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[-1].given[number] = args[1:], kwargs
            if not number:
                inputs.append(args[0])
            if number == len(layers) - 1:
                raise Noted

        return hook

    options = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    with ExitStack() as hooks:
        for number, (_, layer) in enumerate(layers):
            hooks.callback(layer.register_forward_pre_hook(note(number), with_kwargs=True).remove)
        for tokens in batches:
            calls.append(Call())
            with suppress(Noted):
                model(tokens, **options)
    if not inputs:
        raise ConfigError("there is no text to measure the inputs on: give at least one batch")
    return inputs, calls


def watched(layer: nn.Module, prefix: str, hooks: ExitStack, is_gated: bool) -> Iterator[Target]:
    """The targets of a layer. While the hooks exist, each forward adds to their squares.

    Raises ConfigError for packed experts of an unknown form, and for a layer with nothing to prune.
    """
    num_targets = 0
    for name, module in layer.named_modules(prefix=prefix):
        if set(name.removeprefix(prefix).split(".")) & ROUTERS:
            continue
        if isinstance(module, nn.Linear):
            target = Target(f"{name}.weight", module.weight, zeros(module.weight, module.in_features))
            hooks.callback(module.register_forward_pre_hook(add_inputs(target.squares)).remove)
            targets = [target]
        elif name.rpartition(".")[2] == "experts":
            targets = list(packed(name, module, hooks, is_gated))
        else:
            continue
        num_targets += len(targets)
        yield from targets
    if not num_targets:
        raise ConfigError(f"{prefix} holds no linear layer and no packed experts, so there is nothing to prune")


def zeros(weight: Tensor, *shape: int) -> Tensor:
    """Sums to begin with, where a weight lies."""
    return torch.zeros(shape, dtype=torch.float64, device=weight.device)


def add_inputs(squares: Tensor) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        squares.add_(args[0].detach().flatten(0, -2).float().square().sum(0))

    return hook


def packed(name: str, experts: Any, hooks: ExitStack, is_gated: bool) -> Iterator[Target]:
    """The targets of experts with one tensor per kind of matrix: thinwire's [E, I, H], or those of transformers 5."""
    down = getattr(experts, "down_proj", None)
    is_ours, is_theirs = hasattr(experts, "up_proj"), hasattr(experts, "gate_up_proj") and hasattr(experts, "act_fn")
    if not isinstance(down, nn.Parameter) or not (is_ours or is_theirs) or hasattr(experts, "down_proj_bias"):
        raise ConfigError(f"{name} is no packed tensor of experts with a gate: prune supports those of transformers 5")
    inner, outer = down.shape[1:] if is_ours else down.shape[:0:-1]
    of_inputs, of_inner = zeros(down, len(down), outer), zeros(down, len(down), inner)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, index, weights = (*args, *kwargs.values())
        for expert in range(len(down)):
            rows, choice = torch.where(index == expert)
            gates = weights[rows, choice, None].float() if is_gated else 1.0
            inputs = x[rows]
            of_inputs[expert] += (inputs.float() * gates).square().sum(0)
            if getattr(experts, "weigh_inputs", False):
                inputs, gates = (inputs * weights[rows, choice, None]).to(x.dtype), 1.0
            if is_ours:
                hidden = F.silu(inputs @ experts.gate_proj[expert].t()) * (inputs @ experts.up_proj[expert].t())
            else:
                gate, up = (inputs @ experts.gate_up_proj[expert].t()).chunk(2, dim=-1)
                hidden = experts.act_fn(gate) * up
            of_inner[expert] += (hidden.float() * gates).square().sum(0)

    hooks.callback(experts.register_forward_pre_hook(hook, with_kwargs=True).remove)
    for kind in ("gate_proj", "up_proj") if is_ours else ("gate_up_proj",):
        yield Target(f"{name}.{kind}", getattr(experts, kind), of_inputs)
    yield Target(f"{name}.down_proj", down, of_inner, is_transposed=is_ours)
