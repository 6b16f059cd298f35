"""How a model's attention, and the positions of its tokens, are replaced."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire.errors import ConfigError
from thinwire.methods.sequence import Shape
from thinwire.models.llama import Attention, Decoder, attend

NAME = "thinwire-sequence"
# Kinds of layers of transformers whose attention ranks can share; a window is refused by its own rule.
SHARED_LAYERS = {"full_attention", "sliding_attention"}
# Rotary frequencies that follow the longest position of a call, which is another one in each rank's part.
BY_LENGTH = {"dynamic", "longrope"}
# What a call of a model of transformers would do to this rank's part alone, and what to do in its place.
OF_A_PART = {
    "inputs_embeds": "tokens say how long a part is; nearest: input_ids",
    "labels": "they would be shifted inside of each part; nearest: the targets of `split`, and `mean_loss`",
    "past_key_values": "earlier tokens lie on other ranks; nearest: use_cache=False, or a model with whole sequences",
    "position_ids": "these are not the positions in the whole sequence, which the ranks know; nearest: leave them out",
    "attention_mask": "no mask but the causal one; nearest: targets of -100, or the documents of `split`",
}
# What a model of transformers hands to its attention, and no rank could do with the others.
OWN_RULES = {
    "softcap": "a soft cap of scores", "sliding_window": "a window on earlier tokens", "s_aux": "attention sinks",
    "position_bias": "a bias by distance",
}  # fmt: skip


class Exchanged(Protocol):
    """Attention of tokens that lie on several ranks. q, k, v: tensors, or results of `send`.

    attend: attention of whole sequences; None: torch's own.
    """

    def __call__(
        self, q: Any, k: Any, v: Any, *, is_causal: bool = True, scale: float | None = None, attend: Any = None
    ) -> Tensor: ...


def config_of(model: nn.Module) -> Any:
    """The configuration with a model's numbers of heads.

    Raises ConfigError for a model whose attention can't be replaced.
    """
    for module in model.modules():
        if isinstance(module, Decoder) or is_hugging_face(module):
            return module.config
    raise ConfigError(
        f"{type(model).__name__} can't be split along its sequences: its attention can't be replaced; nearest: a "
        "preset such as demo, a model of transformers, or thinwire.ulysses_attention in its own attention"
    )


def attention_of(model: nn.Module, tokens: int, itemsize: int = 4) -> Shape:
    """The attention of a model's layers; see Shape for `tokens`. Raises ConfigError if sequences can't be split."""
    config = config_of(model)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width, of_values = getattr(config, "head_dim", None) or config.hidden_size // heads, 0
    # Attention by latent vectors; there, `head_dim` may be of the rotated part alone.
    if (plain := getattr(config, "qk_nope_head_dim", None)) is not None:
        width, of_values = plain + config.qk_rope_head_dim, config.v_head_dim
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(config, name, 0):
            raise ConfigError(f"{name} {getattr(config, name)}: parts of a sequence can't share a mask; nearest: 0.0")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise ConfigError(f"sliding_window {window}: every token must see all before it; nearest: no sliding_window")
    if others := sorted({*(getattr(config, "layer_types", None) or ())} - SHARED_LAYERS):
        raise ConfigError(f"layer_types {others[0]}: every token must see all before it; nearest: full_attention")
    return Shape(heads, kv_heads, width, tokens, config.num_hidden_layers, itemsize, of_values)


def replace(
    model: nn.Module, attention: Exchanged, positions: Callable[[Tensor], Tensor], longest: Callable[[Tensor], int],
    send: Callable[..., Any],
) -> None:  # fmt: skip
    """Make a model use `attention`, with its tokens at `positions(tokens)`, int64 [tokens].

    longest: of a rank's tokens, the length of the whole sequence.
    send: called with q, k or v and the numbers of query and key heads as soon as each is computed, if the model allows
        it.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            # Compiled layers leave their code for it.
            heads = module.num_heads, module.num_kv_heads
            module.send = torch.compiler.disable(lambda x, heads=heads: send(x, *heads))
            module.attend = torch.compiler.disable(lambda q, k, v: attention(q, k, v, attend=attend))
        elif isinstance(module, Decoder):
            module.positions = positions
        elif is_hugging_face(module):
            replace_in_hugging_face(module, attention, positions, longest)


def is_hugging_face(module: Any) -> bool:
    """Whether it is a language model of transformers, an optional dependency."""
    return hasattr(module, "set_attn_implementation") and module.get_output_embeddings() is not None


def replace_in_hugging_face(
    model: Any, attention: Exchanged, positions: Callable[[Tensor], Tensor], longest: Callable[[Tensor], int]
) -> Callable[[], None]:
    """The same for a language model of transformers, through its own registry of attentions.

    Returns a function to undo it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, dropout: float = 0.0, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if attention_mask is not None or dropout:
            raise ConfigError("attention over several ranks takes no mask but the causal one, and no dropout")
        if rule := next((words for name, words in OWN_RULES.items() if others.get(name) is not None), None):
            raise ConfigError(f"{type(module).__name__} has {rule}, which attention over several ranks doesn't support")
        out = attention(query, key, value, is_causal=getattr(module, "is_causal", True), scale=scaling)
        return out.transpose(1, 2), None

    def place(
        module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        called = {**dict(zip(names, args, strict=False)), **given}
        own = check_call(called, positions)
        length[0] = longest(called["input_ids"])
        return (), {**called, "position_ids": own}

    names, length = list(inspect.signature(model.forward).parameters), [0]
    rotary = [module for module in model.modules() if BY_LENGTH & rope_types(module)]
    # Each model has its own ranks. Another one of the same configuration must not attend over these.
    name, config = f"{NAME}-{id(model)}", model.config
    holders = [module for module in model.modules() if getattr(module, "config", None) is config]
    give(copy.deepcopy(config), holders)
    ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(forward))
    model.set_attn_implementation(name)
    hooks = [model.register_forward_pre_hook(place, with_kwargs=True)]
    hooks += [hook for module in rotary for hook in at_length(module, length)]

    def undo() -> None:
        give(config, holders)
        for hook in hooks:
            hook.remove()

    return undo


def check_call(called: Mapping[str, Any], positions: Callable[[Tensor], Tensor]) -> Tensor:
    """The positions of a call's tokens, int64 [1, tokens]. Raises ConfigError for what concerns a part alone."""
    tokens = called.get("input_ids")
    wrong = [name for name in ("inputs_embeds", "labels", "past_key_values") if called.get(name) is not None]
    mask, stated = called.get("attention_mask"), called.get("position_ids")
    # A mask that hides nothing is what many loops give.
    wrong += ["attention_mask"] if mask is not None and not (isinstance(mask, Tensor) and bool(mask.all())) else []
    own = positions(tokens)[None] if isinstance(tokens, Tensor) else None
    wrong += ["position_ids"] if stated is not None and own is not None and bool((stated != own).any()) else []
    if wrong or own is None:
        name = (wrong or ["inputs_embeds"])[0]
        raise ConfigError(f"{name} of a model whose sequences lie on several ranks: {OF_A_PART[name]}")
    return own


def rope_types(module: nn.Module) -> set[str]:
    """The kinds of rotary frequencies of a module of transformers; empty for any other module."""
    found = getattr(module, "rope_type", None)
    return {*found.values()} if isinstance(found, dict) else {found} if isinstance(found, str) else set()


def at_length(rotary: nn.Module, length: Sequence[int]) -> list[RemovableHandle]:
    """Let frequencies that follow the longest position of a call follow that of the whole sequence, `length[0] - 1`."""

    def longer(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = given["position_ids"] if "position_ids" in given else args[1]
        last = own.new_full((len(own), 1), length[0] - 1)
        return args[:1], {**given, "position_ids": torch.cat([own, last], 1)}

    def without_last(_: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(each[:, :-1] for each in output)

    return [
        rotary.register_forward_pre_hook(longer, with_kwargs=True), rotary.register_forward_hook(without_last)
    ]  # fmt: skip


def give(config: Any, modules: Iterable[Any]) -> None:
    """Make all of these modules of one model share a configuration."""
    for module in modules:
        module.config = config
