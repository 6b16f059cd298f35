"""A small Llama-shaped reference model, a mixture of experts, models from a Hugging Face folder, and a sampler."""

from typing import TYPE_CHECKING

from thinwire.lazy import lazily

if TYPE_CHECKING:
    from thinwire.models.build import PRESETS, build_model, build_skeleton
    from thinwire.models.first import FirstWeights
    from thinwire.models.generation import generate, generate_tokens
    from thinwire.models.hf import HFCausalLM
    from thinwire.models.llama import Llama, LlamaConfig
    from thinwire.models.moe import MoEConfig, MoELlama

__all__ = [
    "PRESETS",
    "FirstWeights",
    "HFCausalLM",
    "Llama",
    "LlamaConfig",
    "MoEConfig",
    "MoELlama",
    "build_model",
    "build_skeleton",
    "generate",
    "generate_tokens",
]
__getattr__ = lazily(
    __name__,
    {
        "build": ("PRESETS", "build_model", "build_skeleton"),
        "first": ("FirstWeights",),
        "generation": ("generate", "generate_tokens"),
        "hf": ("HFCausalLM",),
        "llama": ("Llama", "LlamaConfig"),
        "moe": ("MoEConfig", "MoELlama"),
    },
)
