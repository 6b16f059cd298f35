from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from thinwire.errors import ConfigError, nearest
from thinwire.models.hf import build_hf, skeleton_hf
from thinwire.models.llama import PRESETS as LLAMAS, Llama, LlamaConfig
from thinwire.models.moe import MIXTURES, MoEConfig, MoELlama
from thinwire.models.presets import NAMES, check_preset

Overrides = Mapping[str, int | float | bool | str]
PRESETS: dict[str, LlamaConfig] = LLAMAS | MIXTURES
assert tuple(PRESETS) == NAMES


def build_model(
    name: str, vocab_size: int, seq_len: int, seed: int = 0, overrides: Overrides | None = None
) -> nn.Module:
    """Build the model `name`: one of PRESETS, or `hf:DIR` for a causal LM that transformers builds from a folder.

    `forward(tokens, targets=None)` returns logits [batch, seq, vocab], or the mean loss if targets are given.
    `max_seq_len` is the longest sequence. The same seed gives the same weights.

    Args:
        name: of the model.
        vocab_size: of the tokenizer; a preset's vocabulary.
        seq_len: a preset's longest sequence.
        seed: of fresh weights.
        overrides: replaces fields of the preset's LlamaConfig or MoEConfig, or of the folder's config.

    Raises ConfigError for an unknown name or field, a vocabulary smaller than the tokenizer's, a context that is too
    short.
    """
    overrides = dict(overrides or {})
    if name.startswith("hf:"):
        return build_hf(name.removeprefix("hf:"), vocab_size, seq_len, seed, overrides)
    check_preset(name)
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "max_position_embeddings": seq_len} | checked(
        type(PRESETS[name]), overrides
    )
    config = replace(PRESETS[name], **sizes)
    if config.vocab_size < vocab_size:
        raise ConfigError(f"vocab_size={config.vocab_size}: the tokenizer needs at least {vocab_size}")
    if config.max_position_embeddings < seq_len:
        raise ConfigError(f"max_position_embeddings={config.max_position_embeddings}: must be at least {seq_len}")
    return MoELlama(config, seed) if isinstance(config, MoEConfig) else Llama(config, seed)


def build_skeleton(name: str, vocab_size: int, seq_len: int, overrides: Overrides | None = None) -> nn.Module:
    """The model of `build_model` without memory for its weights, on the device "meta". Raises the same errors."""
    if name.startswith("hf:"):
        return skeleton_hf(name.removeprefix("hf:"), vocab_size, seq_len, dict(overrides or {}))
    with torch.device("meta"):
        return build_model(name, vocab_size, seq_len, overrides=overrides)


def checked(cls: type[LlamaConfig], overrides: Overrides) -> dict[str, int | float | bool | str]:
    """The overrides, if each is a field of `cls` and has its type; else ConfigError."""
    kinds = {field.name: str(field.type) for field in fields(cls)}
    for key, value in overrides.items():
        if key not in kinds:
            raise ConfigError(f"model option {key!r}: no such field{nearest(key, kinds)}")
        given = type(value).__name__
        if given != kinds[key] and (given, kinds[key]) != ("int", "float"):
            raise ConfigError(f"model option {key}={value!r}: must be {kinds[key]}, not {given}")
    return dict(overrides)
