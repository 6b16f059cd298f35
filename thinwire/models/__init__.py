"""A small Llama-shaped reference model, models from a Hugging Face folder, and a sampler."""

from thinwire.models.build import build_model, build_skeleton
from thinwire.models.generation import generate, generate_tokens
from thinwire.models.hf import HFCausalLM
from thinwire.models.llama import PRESETS, Llama, LlamaConfig

__all__ = [
    "PRESETS",
    "HFCausalLM",
    "Llama",
    "LlamaConfig",
    "build_model",
    "build_skeleton",
    "generate",
    "generate_tokens",
]
