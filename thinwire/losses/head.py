"""Makes the head of a language model return the loss in place of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire.errors import ConfigError
from thinwire.losses.cut import cut_cross_entropy
from thinwire.losses.strips import strip_cross_entropy

# Of a micro-batch's logits in fp32; from here on `auto` takes `cut`.
LARGE_BYTES = 256 << 20


def loss_in_effect(asked: str, num_tokens: int, vocab_size: int) -> tuple[str, str]:
    """Whether the loss is "plain" or "cut", and why. num_tokens: tokens of a micro-batch."""
    size = 4 * num_tokens * vocab_size
    shown = f"logits of a micro-batch, {num_tokens} x {vocab_size}, take {size / 1e6:.1f} MB in fp32"
    if asked != "auto":
        return asked, shown
    effect = "plain" if size < LARGE_BYTES else "cut"
    return effect, f"{shown}; from {LARGE_BYTES / 1e6:.0f} MB on they are cut"


def head_of(model: nn.Module) -> nn.Module:
    """The Linear, or Linear in strips, whose output is what `model(tokens)` returns, found by a forward of two tokens.

    Raises ConfigError for a model that does something else to its logits, such as a soft-cap or a scale.
    """
    linears = [each for each in model.modules() if isinstance(each, nn.Linear) or hasattr(type(each), "strips")]
    given: dict[int, nn.Module] = {}

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        given[id(output)] = module
        kept.append(output)

    kept: list[Tensor] = []
    hooks = [module.register_forward_hook(note) for module in linears]
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        with torch.no_grad():
            logits = (
                _faked(model) if device.type == "meta" else model(torch.zeros(1, 2, dtype=torch.int64, device=device))
            )
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    if id(logits) not in given:
        raise ConfigError("loss cut: the model does not return the output of a Linear as its logits; nearest: plain")
    return given[id(logits)]


def _faked(model: nn.Module) -> Tensor:
    """Logits of two tokens, of a model on meta. Foreign models ask for values, but not of fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        fakes = {name: torch.empty_like(tensor, device="cpu") for name, tensor in named}
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        logits: Tensor = torch.func.functional_call(model, fakes, (tokens,), tie_weights=False)
    return logits


def cut_loss(model: nn.Module, head: nn.Module | None = None, impl: str = "auto") -> None:
    """Make `model(tokens, targets)` compute its loss without logits; `model(tokens)` returns them as before.

    During `model(tokens, targets)`, `head`, by default `head_of(model)`, returns the mean loss of `cut_cross_entropy`
    in place of the logits, and the model must pass it on. The head is still called as a module, so hooks of hosts
    around its forward run. A head with `strips`, Linears of consecutive words, is used strip by strip. impl: see
    `cut_cross_entropy`; a second call for a model takes the place of the first.
    """
    head, own = head or head_of(model), vars(model).get("gives_logits", model.forward)
    vars(model)["gives_logits"] = own

    def forward(tokens: Tensor, targets: Tensor | None = None, *more: Tensor) -> Tensor:
        if targets is None:
            return own(tokens)
        before: Any = vars(head).get("forward")
        head.forward = _giving(head, targets, impl)
        try:
            return own(tokens, targets, *more)
        finally:
            if before is None:
                del head.forward
            else:
                head.forward = before

    model.forward = forward
    vars(model)["gives_loss"] = True


def _giving(head: Any, targets: Tensor, impl: str) -> Callable[[Tensor], Tensor]:
    """A forward of the head that gives the mean loss; under autocast products are computed in its dtype."""

    def loss(hidden: Tensor) -> Tensor:
        # On meta nothing is computed, and torch knows no autocast there.
        kind = "cpu" if hidden.is_meta else hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        with torch.autocast(kind, enabled=False):
            if (strips := getattr(head, "strips", None)) is not None:
                # Sums over strips would be rounded in a narrow dtype.
                wide = hidden if hidden.dtype == torch.float64 else hidden.float()
                return strip_cross_entropy(wide, strips, targets, dtype=dtype)
            return cut_cross_entropy(hidden.to(dtype), head.weight.to(dtype), targets, bias=head.bias, impl=impl)

    return loss
