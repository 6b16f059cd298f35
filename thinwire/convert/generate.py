"""Generates text with a trained model."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from thinwire.checkpoint import nearest_run
from thinwire.convert.options import GenerateConfig
from thinwire.convert.saved import load_run
from thinwire.data import Tokenizer, load_tokenizer, printable
from thinwire.errors import ConfigError
from thinwire.models import build_model, generate_tokens
from thinwire.models.hf import refuse_pickles
from thinwire.run.run_dir import RunDir

# A decoder's output for the first bytes of an incomplete character.
BROKEN = "\ufffd"


def pieces(config: GenerateConfig) -> Iterator[str]:
    """Yield the prompt, then each piece of text as soon as the model has drawn it; see `load_source`."""
    model, tokenizer = load_source(config.source)
    prompt = [int(token) for token in tokenizer.encode(config.prompt)] or [tokenizer.end_of_document or 0]
    generator = torch.Generator().manual_seed(config.seed)
    drawn = generate_tokens(model, torch.tensor([prompt]), config.tokens, config.temperature, generator)
    yield from map(printable, decoded(tokenizer, prompt, (int(token) for token in drawn)))


def decoded(tokenizer: Tokenizer, prompt: Sequence[int], drawn: Iterable[int]) -> Iterator[str]:
    """Yield the text of the prompt and of the following tokens, piece by piece, always whole characters."""
    tokens = list(prompt)
    text = tokenizer.decode(tokens)
    yield text.rstrip(BROKEN)
    shown = len(text.rstrip(BROKEN))
    for token in drawn:
        tokens.append(token)
        text = tokenizer.decode(tokens)
        yield text[shown:].rstrip(BROKEN)
        shown = max(shown, len(text.rstrip(BROKEN)))
    yield text[shown:]


def load_source(source: str) -> tuple[nn.Module, Tokenizer]:
    """Load the model and the tokenizer of a run directory or of a transformers folder. Warns if it is hardly trained.

    Raises ConfigError for any other folder.
    """
    source = str(Path(source.removeprefix("hf:")).expanduser())
    if RunDir(source).config().is_file():
        run = load_run(source)
        blind = math.log(run.tokenizer.vocab_size)
        # A model that has learned only the frequency of each token reaches about half of this loss.
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
    tokenizer = load_tokenizer(source)
    refuse_pickles(folder)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{source} holds no weights: generate needs .safetensors files")
    return build_model(f"hf:{source}", tokenizer.vocab_size, 1), tokenizer
