"""How a model's attention, and the positions of its tokens, are replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.methods.sequence import Shape
from thinwire.models.llama import Attention, Decoder, attend

NAME = "thinwire-sequence"
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
    return Shape(heads, kv_heads, width, tokens, config.num_hidden_layers, itemsize, of_values)


def replace(
    model: nn.Module, attention: Exchanged, positions: Callable[[Tensor], Tensor], send: Callable[..., Any]
) -> None:
    """Make a model use `attention`, with its tokens at `positions(tokens)`, int64 [tokens].

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
            replace_in_hugging_face(module, attention, positions)


def is_hugging_face(module: Any) -> bool:
    """Whether it is a language model of transformers, an optional dependency."""
    return hasattr(module, "set_attn_implementation") and module.get_output_embeddings() is not None


def replace_in_hugging_face(
    model: Any, attention: Exchanged, positions: Callable[[Tensor], Tensor]
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
        tokens = given["input_ids"] if "input_ids" in given else args[0]
        return args, {"position_ids": positions(tokens)[None], **given}

    # Each model has its own ranks. Another one of the same configuration must not attend over these.
    name, config = f"{NAME}-{id(model)}", model.config
    holders = [module for module in model.modules() if getattr(module, "config", None) is config]
    give(copy.deepcopy(config), holders)
    ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(forward))
    model.set_attn_implementation(name)
    hook = model.register_forward_pre_hook(place, with_kwargs=True)

    def undo() -> None:
        give(config, holders)
        hook.remove()

    return undo


def give(config: Any, modules: Iterable[Any]) -> None:
    """Make all of these modules of one model share a configuration."""
    for module in modules:
        module.config = config
