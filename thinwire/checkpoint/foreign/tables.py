"""Tables of rules: from other programs' names to Hugging Face's names for Llama, Mistral and Qwen.

thinwire's own Llama-shaped model uses the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.checkpoint.foreign.layouts import FusedShards, Replicated, Sharded
from thinwire.checkpoint.foreign.rules import Rule, left_out
from thinwire.errors import ConfigError

LAYER = r"model.layers.\1."


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model that the rules need, under the names of a Hugging Face `config.json`."""

    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Sizes:
        """Read the sizes from a `config.json`. Raises ConfigError if one is missing."""
        try:
            heads, vocab_size = int(config["num_attention_heads"]), int(config["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"config.json: no number {error}; it is that of no decoder with attention") from None
        return cls(
            heads, int(config.get("num_key_value_heads") or heads), vocab_size, bool(config.get("tie_word_embeddings"))
        )

    def head(self, pattern: str, rule: Rule) -> Rule:
        """Rule for the output layer: `rule`, or a rule that skips it if the embedding serves as the output layer."""
        return left_out(pattern) if self.tie_word_embeddings else rule


def huggingface(sizes: Sizes) -> tuple[Rule, ...]:
    """Hugging Face's own names, unchanged; a file holds whole tensors."""
    layer = r"model\.layers\.\d+\."
    head = r"lm_head\.weight"
    return (
        Rule(r"model\.embed_tokens\.weight", num_rows=sizes.vocab_size),
        Rule(layer + r"self_attn\.[qkvo]_proj\.(?:weight|bias)"),
        Rule(layer + r"self_attn\.[qk]_norm\.weight"),
        Rule(layer + r"mlp\.(?:gate|up|down)_proj\.weight"),
        Rule(layer + r"block_sparse_moe\.(?:gate|experts\.\d+\.w[123])\.weight"),
        Rule(layer + r"(?:input|post_attention)_layernorm\.weight"),
        Rule(r"model\.norm\.weight"),
        sizes.head(head, Rule(head, num_rows=sizes.vocab_size)),
        left_out(layer + r"self_attn\.rotary_emb\.inv_freq"),
    )


def torchtitan(sizes: Sizes) -> tuple[Rule, ...]:
    """torchtitan's Llama 3. Its rotary pairs are neighbours, so rows of queries and keys are sorted into two halves."""
    layer = r"(?:model\.)?layers\.(\d+)\."
    head = r"(?:model\.)?output\.weight"
    return (
        Rule(r"(?:model\.)?tok_embeddings\.weight", ("model.embed_tokens.weight",), num_rows=sizes.vocab_size),
        Rule(
            layer + r"attention\.wq\.weight",
            (LAYER + "self_attn.q_proj.weight",),
            cut=rotary_halves(sizes.num_attention_heads),
        ),
        Rule(
            layer + r"attention\.wk\.weight",
            (LAYER + "self_attn.k_proj.weight",),
            cut=rotary_halves(sizes.num_key_value_heads),
        ),
        Rule(layer + r"attention\.w([vo])\.weight", (LAYER + r"self_attn.\2_proj.weight",)),
        Rule(layer + r"feed_forward\.w1\.weight", (LAYER + "mlp.gate_proj.weight",)),
        Rule(layer + r"feed_forward\.w2\.weight", (LAYER + "mlp.down_proj.weight",)),
        Rule(layer + r"feed_forward\.w3\.weight", (LAYER + "mlp.up_proj.weight",)),
        Rule(layer + r"attention_norm\.weight", (LAYER + "input_layernorm.weight",)),
        Rule(layer + r"ffn_norm\.weight", (LAYER + "post_attention_layernorm.weight",)),
        Rule(r"(?:model\.)?norm\.weight", ("model.norm.weight",)),
        sizes.head(head, Rule(head, ("lm_head.weight",), num_rows=sizes.vocab_size)),
        left_out(r"(?:model\.)?(?:freqs_cis|rope\.cache)"),
        left_out(r"(?:optimizer|lr_scheduler|dataloader|train_state)(?:\..*)?"),
    )


def megatron(sizes: Sizes) -> tuple[Rule, ...]:
    """Megatron core's names, cut over tensor-parallel ranks. Norms are separate or part of the layer that follows."""
    layer = r"decoder\.layers\.(\d+)\."
    head = r"output_layer\.weight"
    qkv = tuple(f"{LAYER}self_attn.{which}_proj.\\2" for which in "qkv")
    gate_up = (LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight")
    attention_norm = r"(?:input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight)"
    mlp_norm = r"(?:pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight)"
    return (
        Rule(r"embedding\.word_embeddings\.weight", ("model.embed_tokens.weight",), Sharded(0), sizes.vocab_size),
        Rule(layer + attention_norm, (LAYER + "input_layernorm.weight",), Replicated()),
        Rule(layer + r"self_attention\.linear_qkv\.(weight|bias)", qkv, Sharded(0), cut=by_query_group(sizes)),
        Rule(layer + r"self_attention\.([qk])_layernorm\.weight", (LAYER + r"self_attn.\2_norm.weight",), Replicated()),
        Rule(layer + r"self_attention\.linear_proj\.weight", (LAYER + "self_attn.o_proj.weight",), Sharded(1)),
        Rule(layer + mlp_norm, (LAYER + "post_attention_layernorm.weight",), Replicated()),
        Rule(layer + r"mlp\.linear_fc1\.weight", gate_up, FusedShards((1, 1)), cut=lambda tensor: tensor.chunk(2)),
        Rule(layer + r"mlp\.linear_fc2\.weight", (LAYER + "mlp.down_proj.weight",), Sharded(1)),
        Rule(r"decoder\.final_layernorm\.weight", ("model.norm.weight",), Replicated()),
        sizes.head(head, Rule(head, ("lm_head.weight",), Sharded(0), sizes.vocab_size)),
        left_out(r".*\._extra_state\d*"),
        left_out(r"rotary_pos_emb\.inv_freq"),
    )  # fmt: skip


def rotary_halves(num_heads: int) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that sorts the rows of each head.

    Rows in the order (x_0, y_0, x_1, y_1, ...) become (x_0, x_1, ..., y_0, y_1, ...).
    """

    def cut(tensor: Tensor) -> list[Tensor]:
        pairs = tensor.unflatten(0, (num_heads, -1, 2))
        return [pairs.transpose(1, 2).reshape(tensor.shape)]

    return cut


def by_query_group(sizes: Sizes) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that cuts fused rows into queries, keys and values.

    The rows lie as [queries of group 0, key 0, value 0, queries of group 1, ...]. A group is one head of keys with the
    heads of queries that use it. A rank holds whole groups.
    """
    groups, queries = sizes.num_key_value_heads, sizes.num_attention_heads // sizes.num_key_value_heads

    def cut(tensor: Tensor) -> list[Tensor]:
        heads = tensor.unflatten(0, (groups, queries + 2, -1))
        return [part.flatten(0, 2) for part in heads.split([queries, 1, 1], dim=1)]

    return cut
