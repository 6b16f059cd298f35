from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import ConfigError, nearest_divisor
from thinwire.losses.cut import IGNORED
from thinwire.models.documents import apart, bounds_of

LONGEST_PLAIN_ATTENTION = 512


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-shaped decoder; the fields carry the names of a Hugging Face `config.json`.

    Raises ConfigError for a size below one, heads that do not divide, or an odd head width (rotary pairs).
    """

    vocab_size: int = 256
    """Number of token ids."""
    hidden_size: int = 512
    """Width of the residual stream; a multiple of 2 * num_attention_heads."""
    intermediate_size: int = 1024
    """Inner width of the MLP."""
    num_hidden_layers: int = 4
    """Number of decoder layers."""
    num_attention_heads: int = 4
    """Query heads of a layer."""
    num_key_value_heads: int = 2
    """Key and value heads of a layer; divides num_attention_heads."""
    max_position_embeddings: int = 1024
    """Most tokens of one sequence."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding's frequencies; above 0."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in every norm; above 0."""
    tie_word_embeddings: bool = False
    """Use the embedding's weights for the output layer too."""

    def __post_init__(self) -> None:
        for field in fields(LlamaConfig):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"{field.name}={value}: must be above zero")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % (2 * heads):
            valid = max(1, round(self.hidden_size / (2 * heads))) * 2 * heads
            raise ConfigError(
                f"hidden_size={self.hidden_size}: must be a multiple of 2 * num_attention_heads={2 * heads}; "
                f"nearest is {valid}"
            )
        if heads % kv_heads:
            valid = nearest_divisor(kv_heads, heads)
            raise ConfigError(
                f"num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}; nearest is {valid}"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head: hidden_size / num_attention_heads."""
        return self.hidden_size // self.num_attention_heads


def rotary_table(config: LlamaConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [length, head_size / 2] in `dtype`, of position * theta^(-2i / head_size); positions: [length].

    Computed anew in every forward: microseconds, and a buffer would lose precision in `model.bfloat16()`.
    Source: Su et al., RoFormer, section 3.2.2.
    """
    exponents = torch.arange(0, config.head_size, 2, device=positions.device, dtype=dtype) / config.head_size
    angles = positions.to(dtype)[:, None] * config.rope_theta**-exponents
    return angles.cos(), angles.sin()


def positions_in(tokens: Tensor) -> Tensor:
    """Positions of the tokens [batch, seq] of whole sequences: int64 [seq]."""
    return torch.arange(tokens.shape[1], device=tokens.device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x_i, x_{i + d/2}) of `x` [..., seq, d] by the table's angles; same dtype back."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `q` [batch, heads, seq, d] over `k`, `v` [batch, kv_heads, seq, d]; shape and dtype of `q`.

    softmax(q k^T / sqrt(d) + mask) v, with the softmax in fp32 or float64, and equal groups of query heads per key
    head. Short sequences on a CPU use plain products, which are 2.8 times as fast there as the fused kernel (4 x 4
    heads x 256 x 128, bf16, forward and backward, one thread). For long sequences, the seq^2 weights would take too
    much memory.
    """
    batch, heads, length, width = q.shape
    kv_heads = k.shape[1]
    if q.device.type != "cpu" or length > LONGEST_PLAIN_ATTENTION:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != heads)
    rows = heads // kv_heads * length
    mask = torch.full((length, length), -math.inf, dtype=q.dtype).triu(1).repeat(heads // kv_heads, 1)
    scores = torch.baddbmm(
        mask.expand(batch * kv_heads, rows, length), q.reshape(-1, rows, width),
        k.reshape(-1, length, width).transpose(1, 2), alpha=width**-0.5,
    )  # fmt: skip
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return (weights @ v.reshape(-1, length, width)).view(q.shape)


class Linear(nn.Linear):
    """nn.Linear without bias whose weights are left to `Llama.init_weights` (the global seed stays untouched)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Does nothing."""


class Embedding(nn.Embedding):
    """nn.Embedding whose weights are left to `Llama.init_weights`."""

    def reset_parameters(self) -> None:
        """Does nothing."""


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions. Source: Ainslie et al. 2023 (GQA).

    attend: of q, k and v, `attend` itself unless tokens of a sequence lie on several ranks. Then send is what becomes
    of q, k and v before, each as soon as it is there. bounds: of documents that attend only to themselves, see
    `models.documents`; empty: each sequence is one.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attend: Callable[[Any, Any, Any], Tensor] = attend
        self.send: Callable[[Tensor], Any] | None = None
        self.bounds: list[list[int]] = []
        self.head_size = config.head_size
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        kv_size = config.num_key_value_heads * config.head_size
        self.q_proj = Linear(config.hidden_size, config.hidden_size)
        self.k_proj = Linear(config.hidden_size, kv_size)
        self.v_proj = Linear(config.hidden_size, kv_size)
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps `x` [batch, seq, hidden] to the same shape."""
        found: list[Any] = []
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            own = projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            own = own if projection is self.v_proj else rotate(own, cos, sin)
            found.append(own if self.send is None else self.send(own))
        y = (apart(self.attend, self.bounds) if self.bounds else self.attend)(*found)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Source: Shazeer 2020."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x` [batch, seq, hidden] to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps `x` [batch, seq, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, the decoder layers and the last norm; exists so that names match Hugging Face's `model.*`.

    positions: of the tokens given, in their sequences.
    """

    def __init__(self, config: LlamaConfig, make_mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.positions: Callable[[Tensor], Tensor] = positions_in
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, make_mlp()) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens [batch, seq] to hidden states [batch, seq, hidden]."""
        x = self.embed_tokens(tokens)
        # Of float64 too: the last bit of a cosine depends on where in the table it is.
        cos, sin = rotary_table(self.config, self.positions(tokens), torch.promote_types(x.dtype, torch.float32))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy (nats) of logits [batch, seq, vocab] against targets [batch, seq]; -100 is ignored.

    It is computed in fp32, or in fp64 if the logits are. If the head computes the loss itself, `logits` is that scalar,
    and it is returned. A mean over no tokens is 0, as a rank may have no text in a step.
    """
    if logits.dim() == 0:
        return logits
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp_min(1)


def with_gradient_of(loss: Tensor, other: Tensor) -> Tensor:
    """The value of `loss`, with the gradient of both."""
    return loss + (other - other.detach())


class Llama(nn.Module):
    """A Llama-shaped causal language model; its state dict loads into Hugging Face's LlamaForCausalLM unchanged.

    Weights start as `init_weights` of the seed. Source: Touvron et al. 2023.
    """

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, self.make_mlp)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.init_weights(torch.Generator().manual_seed(seed))

    def make_mlp(self) -> nn.Module:
        """The module of a layer after its attention."""
        return MLP(self.config)

    @property
    def max_seq_len(self) -> int:
        """The longest sequence `forward` accepts."""
        return self.config.max_position_embeddings

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, a tied weight counted once."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Matrices from N(0, 0.02^2), those that write to the residual stream divided by sqrt(2 * layers); norms 1.

        Drawn on the generator's device, so a CPU generator gives the same weights wherever the model lives. On "meta"
        nothing is drawn.
        """
        # Where there is no memory, nothing is drawn.
        if any(param.is_meta for param in self.parameters()):
            return
        for name, param in self.named_parameters():
            param.copy_(self.first(name, param.shape, generator))

    def first(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """The first values of a parameter of this shape; see `init_weights`. Only a matrix draws."""
        if len(shape) < 2:
            return torch.ones(shape)
        to_residual = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
        std = 0.02 / math.sqrt(2 * self.config.num_hidden_layers) if to_residual else 0.02
        return torch.randn(shape, generator=generator, device=generator.device).mul_(std)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits [batch, seq, vocab] of int64 tokens [batch, seq]; the mean loss (fp32 scalar) if targets are given.

        documents: int64 [batch, seq], the number of each token's document, to which alone it attends; None: each
        sequence is one. Raises ConfigError when seq exceeds `max_seq_len`.
        """
        if tokens.shape[1] > self.max_seq_len:
            raise ConfigError(
                f"sequence of {tokens.shape[1]} tokens: the model holds at most {self.max_seq_len} "
                "(max_position_embeddings)"
            )
        bounds = [] if documents is None else bounds_of(documents)
        for module in self.modules():
            if isinstance(module, Attention):
                # Stays until the next forward: a layer may be computed again in the backward.
                module.bounds = bounds
        logits = self.lm_head(self.model(tokens))
        return logits if targets is None else next_token_loss(logits, targets)


PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    ),
    "demo": LlamaConfig(),
    "125m": LlamaConfig(
        vocab_size=50_304, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=2048, tie_word_embeddings=True,
    ),
    "350m": LlamaConfig(
        vocab_size=50_304, hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=2048, tie_word_embeddings=True,
    ),
    "1b": LlamaConfig(
        vocab_size=50_304, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=2048, rope_theta=500_000.0, tie_word_embeddings=True,
    ),
}  # fmt: skip
