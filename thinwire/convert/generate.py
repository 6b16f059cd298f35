"""A text that a trained model continues."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import nn

from thinwire.checkpoint import nearest_run
from thinwire.convert.options import GenerateConfig
from thinwire.convert.saved import load_run
from thinwire.data import Tokenizer, load_tokenizer, printable
from thinwire.errors import ConfigError
from thinwire.models import build_model, generate
from thinwire.training.run_dir import RunDir


def go_on(config: GenerateConfig) -> str:
    """The prompt, and what the model writes after it; see `load_source`."""
    model, tokenizer = load_source(config.source)
    prompt = [int(token) for token in tokenizer.encode(config.prompt)] or [tokenizer.end_of_document or 0]
    generator = torch.Generator().manual_seed(config.seed)
    tokens = generate(model, torch.tensor([prompt]), config.tokens, config.temperature, generator)
    return printable(tokenizer.decode(tokens[0].tolist()))


def load_source(source: str) -> tuple[nn.Module, Tokenizer]:
    """The model and the tokenizer of a run directory or of a folder of transformers; says if it is hardly trained.

    Raises ConfigError for neither.
    """
    if RunDir(source).config().is_file():
        run = load_run(source)
        blind = math.log(run.tokenizer.vocab_size)
        # Half of it is about what the frequencies of single bytes or tokens give away.
        if run.loss is not None and not run.loss < blind / 2:
            print(
                f"thinwire: {source} is hardly trained: its loss was {run.loss:.2f} after step {run.step}, and a blind "
                f"guess among {run.tokenizer.vocab_size:,} tokens has {blind:.2f}; train it longer",
                file=sys.stderr,
            )
        return run.model, run.tokenizer
    folder = Path(source)
    if not (folder / "config.json").is_file():
        hint = nearest_run(folder)
        raise ConfigError(f"{source} is neither a run directory nor a folder with a config.json{hint}")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{source} holds no tokenizer.json: copy the model's own into it")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{source} holds no .safetensors file, and a model with random weights has nothing to say")
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    return build_model(f"hf:{source}", tokenizer.vocab_size, 1), tokenizer
