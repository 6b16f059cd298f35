"""Tries a cut model on a few tokens before anything trains: its chunks must give what the whole model gives."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from thinwire.device import random_state
from thinwire.errors import ConfigError
from thinwire.methods.pipeline.chunks import Cut
from thinwire.models.modes import evaluating

# Targets that count for no loss.
IGNORED = -100
# What modules raise that need something of other chunks.
FAULTS = (RuntimeError, TypeError, AttributeError, KeyError, IndexError, ValueError, AssertionError)
# Tokens of a sequence in training: what the trial keeps for its backward must be less than a small stage's weights.
LENGTH = 3
DROPOUTS = {
    name + end
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for end in ("", "_")
} | {"dropout1d", "dropout2d", "dropout3d"}  # fmt: skip
# Uniform numbers in place of drawn ones: below and above nearly every threshold.
LOWEST, HIGHEST = 2.0**-20, 1 - 2.0**-20


def check_apart(made: Cut) -> None:
    """Raise ConfigError if a layer shares a weight with another chunk, or with a module around the layers.

    Each of the two ranks would train a copy of it. Modules before and after the layers may share one.
    """
    place = {name: chunk for chunk in range(made.num_chunks) for name in made.layers_of(chunk)}
    found: dict[int, tuple[str, int | None]] = {}
    for name, param in made.model.named_parameters(remove_duplicate=False):
        layer = next((layer for layer in place if name.startswith(f"{layer}.")), "")
        other, chunk = found.setdefault(id(param), (name, place.get(layer)))
        if chunk != place.get(layer):
            raise ConfigError(
                f"{other} and {name} are one weight, and would lie in two chunks, which train it apart; nearest: give "
                "each its own, or share it within one chunk"
            )


def check_logits(made: Cut, tokens: Tensor, logits: Tensor) -> None:
    """Raise ConfigError unless the chunks, one after the other, give the model's own logits, bit for bit."""
    hidden: Tensor | None = None
    try:
        with torch.no_grad():
            if made.vocabulary is not None:
                hidden = made.model.get_submodule(made.vocabulary.embedding.name)(tokens)
            for number in range(made.num_chunks):
                with evaluating(made.chunk(number)) as chunk:
                    hidden = chunk(hidden, (tokens, None))
            if made.vocabulary is not None:
                hidden = made.model.get_submodule(made.vocabulary.head)(hidden)
    except FAULTS as error:
        raise ConfigError(
            f"the layers exchange more than a hidden state, so they can't be cut: {_reason(error)}"
        ) from error
    if hidden is None or not torch.equal(hidden, logits):
        raise ConfigError(
            "cut, the model gives other logits: its layers exchange more than a hidden state, or something is computed "
            "between them"
        )


def check_training(made: Cut, tokens: Tensor) -> None:
    """Raise ConfigError unless the chunks give the model's own loss in training, and its gradients behind every layer.

    Two sequences, with targets, forward and backward. Dropout is set aside, and uniform numbers are the same
    everywhere. Where the model draws others besides, values are not compared.

    Args:
        made: of a copy of the model, whose modules have the modes in which they train.
        tokens: [1, seq], of which the first make two sequences.
    """
    if made.num_chunks == 1:
        return
    model = made.model if made.model.training else made.model.train()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    rows = tokens[:, : 2 * LENGTH].view(2, LENGTH)
    targets = rows.roll(-1, 1)
    targets[:, -1] = IGNORED
    batch = rows, targets
    with _repeatable(model, tokens.device, HIGHEST), torch.no_grad():
        _whole(made, batch)
    with _repeatable(model, tokens.device, LOWEST) as draws:
        loss, gradients = _whole(made, batch)
        is_drawn = draws()
    with _repeatable(model, tokens.device, LOWEST):
        found_loss, found = _in_chunks(made, batch)
    if is_drawn or not all(each.isfinite().all() for each in (loss, *gradients.values())):
        return
    if not _close(found_loss, loss, 16):
        raise ConfigError(
            f"cut, the model has another loss in training, {found_loss:.6g} instead of {loss:.6g}: it adds "
            "something to the cross-entropy that a stage can't compute, or computes something between layers in "
            "training alone"
        )
    for place in sorted(gradients, reverse=True):
        if not _close(found[place], gradients[place], 256):
            where = f"behind {made.layers}.{place - 1}" if place else f"in front of {made.layers}.0"
            raise ConfigError(
                f"cut, the model has another gradient in training {where}: its loss, or a later layer, uses more of an "
                "earlier layer than the hidden state that passes on, such as a balance loss"
            )


class _Watched:
    """Notes which layers of a model run, also in its chunks, and the hidden state in front of and behind each."""

    def __init__(self, made: Cut) -> None:
        self.names = [name for chunk in range(made.num_chunks) for name in made.layers_of(chunk)]
        self.calls: list[str] = []
        self.states: dict[int, Tensor] = {}
        layers = [made.model.get_submodule(name) for name in self.names]
        self._hooks = [layers[0].register_forward_pre_hook(self._before, with_kwargs=True)]
        self._hooks += [layer.register_forward_hook(self._behind(number)) for number, layer in enumerate(layers)]

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._keep(0, next(value for value in (*args[:1], *kwargs.values()) if is_hidden(value)))

    def _behind(self, number: int) -> Any:
        def note(layer: nn.Module, args: Any, output: Any) -> None:
            self.calls.append(self.names[number])
            self._keep(number + 1, output[0] if isinstance(output, tuple) else output)

        return note

    def _keep(self, place: int, hidden: Tensor) -> None:
        # Behind frozen layers too.
        if torch.is_grad_enabled():
            self.states.setdefault(place, hidden if hidden.requires_grad else hidden.requires_grad_())


def _whole(made: Cut, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
    """The loss of the whole model, and its gradients behind so many layers; these only where gradients are on."""
    with _Watched(made) as watched:
        try:
            loss = made.model(*batch)
            once, states = list(watched.calls), watched.states
            gradients = _gradients(loss, states, None) if states else {}
        except FAULTS as error:
            if "checkpoint" in str(error):
                raise ConfigError(_recomputes(made.layers)) from error
            raise ConfigError(f"in training the model fails with 2 sequences and targets: {_reason(error)}") from error
    names = watched.names
    if once != names:
        missing = next((name for name in names if name not in once), names[0])
        raise ConfigError(
            f"in training {missing} does not run once, in its order, in every forward: a stage can't leave layers out; "
            "nearest: a layer drop of 0"
        )
    if len(watched.calls) > len(names) or (torch.is_grad_enabled() and len(states) <= len(names)):
        raise ConfigError(_recomputes(made.layers))
    return loss.detach(), gradients


def _in_chunks(made: Cut, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
    """As `_whole`, of the chunks one after the other."""
    passed: list[tuple[Tensor | None, Tensor, dict[int, Tensor]]] = []
    gradients: dict[int, Tensor] = {}
    hidden: Tensor | None = None
    number = 0
    try:
        if made.vocabulary is not None:
            hidden = made.model.get_submodule(made.vocabulary.embedding.name)(batch[0]).detach().requires_grad_()
        for number in range(made.num_chunks):
            with _Watched(made) as watched:
                left = made.chunk(number)(hidden, batch)
            if hidden is not None and 0 in watched.states:
                # The hook in front of the first layer sees the stand-in that what arrives replaces.
                watched.states[0] = hidden
            passed.append((hidden, left, watched.states))
            hidden = left.detach().requires_grad_()
        if made.vocabulary is not None:
            logits = made.model.get_submodule(made.vocabulary.head)(hidden)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
            passed.append((hidden, F.cross_entropy(wide, batch[1].flatten()), {}))
        gradient: Tensor | None = None
        for place in reversed(range(len(passed))):
            number = min(place, made.num_chunks - 1)
            arrived, left, states = passed[place]
            found = _gradients(left, states | ({} if arrived is None else {-1: arrived}), gradient)
            gradient = found.pop(-1, None)
            gradients |= found
    except FAULTS as error:
        if "checkpoint" in str(error):
            raise ConfigError(_recomputes(made.layers)) from error
        why = "changes its input in place" if "in-place" in str(error) else "needs more than a hidden state"
        raise ConfigError(
            f"in training the chunk of {made.span(number)} {why}, so the model can't be cut: {_reason(error)}"
        ) from error
    return passed[-1][1].detach(), gradients


def _gradients(output: Tensor, states: Mapping[int, Tensor], gradient: Tensor | None) -> dict[int, Tensor]:
    """Of hidden states alone: those of weights would take as much memory as the weights."""
    if not states:
        return {}
    found = torch.autograd.grad(output, list(states.values()), gradient, allow_unused=True)
    return {
        place: torch.zeros_like(state) if each is None else each
        for (place, state), each in zip(states.items(), found, strict=True)
    }


class _Steady(TorchFunctionMode):
    """Sets dropout aside, and gives one value wherever uniform numbers are drawn, without drawing them."""

    def __init__(self, drawn: float) -> None:
        super().__init__()
        self.drawn = drawn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name in ("rand", "rand_like"):
            return getattr(torch, name.replace("rand", "empty"))(*args, **_without_generator(kwargs)).fill_(self.drawn)
        if name == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], *([0.0] if len(args) > 4 else []), *args[5:]), dict(kwargs)
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _without_generator(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "generator"}


@contextmanager
def _repeatable(model: nn.Module, device: torch.device, drawn: float) -> Iterator[Any]:
    """Context after which random numbers and the model's buffers are as before.

    Gives a function that tells whether random numbers were drawn.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    python, before = random.getstate(), random_state()

    def are_drawn() -> bool:
        pairs = zip(before, random_state(), strict=True)
        same = all(one is None or other is None or torch.equal(one, other) for one, other in pairs)
        return not same or random.getstate() != python

    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), _Steady(drawn):
            yield are_drawn
    finally:
        random.setstate(python)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _close(found: Tensor, expected: Tensor, steps: int) -> bool:
    """Within so many roundings, relative to the norm."""
    far = min(steps * torch.finfo(expected.dtype).eps, 0.05)
    distance = torch.linalg.vector_norm(found.double() - expected.double())
    return bool(distance <= far * torch.linalg.vector_norm(expected.double()))


def _recomputes(layers: str) -> str:
    return (
        f"the model computes {layers} again in the backward (torch.utils.checkpoint), which a chunk can't; nearest: "
        'leave that out, and use recompute="always"'
    )


def is_hidden(value: object) -> bool:
    """Whether it is a tensor [batch, seq, features]."""
    return isinstance(value, Tensor) and value.ndim == 3


def _reason(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
