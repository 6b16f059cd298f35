"""The trained model from which another is made: a run's last checkpoint, or a folder of transformers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from thinwire.checkpoint.foreign import SafetensorsSource
from thinwire.convert.export import described, load_strictly, sequences_of
from thinwire.convert.foreign import copy_tokenizer
from thinwire.convert.saved import open_run
from thinwire.convert.streamed import StreamedModel
from thinwire.convert.tokenizer import write_tokenizer
from thinwire.data import Tokenizer, heldout_batches, load_tokenizer, prepare
from thinwire.errors import ConfigError
from thinwire.models.hf import HFCausalLM, longest, look_into
from thinwire.models.kept import PACKED, read_packed
from thinwire.run.config import DEFAULTS

FOLDER = "hf:"
LONGEST, MICRO_BATCH = 256, 4


class ModelOrigin(Protocol):
    """A trained model. settings: its config.json. tokenizer: of its text. seq_len: of sequences to test it with."""

    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def seq_len(self) -> int: ...

    def names(self) -> Iterable[str]:
        """Names of its tensors, as in a folder of transformers; a shared tensor has one name."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        ...

    def model(self) -> nn.Module:
        """The model in evaluation mode, whose model(tokens) gives logits [batch, seq, vocab]."""
        ...

    def tokens(self, data: str | None, sequences: int, *, trains: bool = False) -> Iterable[tuple[Tensor, Tensor]]:
        """Sequences of the held-out (or the training) part of a text: (tokens, targets) int64 [<= 4, seq_len]."""
        ...

    def write_tokenizer(self, folder: Path) -> None:
        """Put the tokenizer into a folder."""
        ...


def open_origin(source: str) -> ModelOrigin:
    """The origin `hf:DIR`, or a run directory. Raises ConfigError if it holds no weights."""
    return Folder(Path(source.removeprefix(FOLDER)).expanduser()) if source.startswith(FOLDER) else SavedModel(source)


class Folder:
    """A folder of transformers, whose tensors are read one at a time."""

    def __init__(self, path: Path) -> None:
        if not look_into(path):
            raise ConfigError(f"{path} holds no weights: .safetensors files are needed")
        if (path / PACKED).is_file():
            raise ConfigError(
                f"{path} holds packed weights, which only train and generate read; nearest: "
                f"thinwire.unpack({str(path)!r}, {str(path) + '-whole'!r})"
            )
        self.path = path
        self.settings: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        has_own = (path / "tokenizer.json").is_file()
        self.tokenizer = load_tokenizer(str(path) if has_own else "bytes")
        size = self.settings.get("vocab_size", 0)
        if self.tokenizer.vocab_size > size:
            what = f"tokenizer of {self.tokenizer.vocab_size} tokens is larger than the model's vocabulary of {size}"
            raise ConfigError(f"{path}: its {what}" if has_own else f"{path} holds no tokenizer.json, and the {what}")
        self._files = SafetensorsSource(path)

    @property
    def seq_len(self) -> int:
        config = self.model().model.config
        return min(longest(config) or LONGEST, LONGEST)

    def names(self) -> Iterable[str]:
        return self._files.names()

    def tensor(self, name: str) -> Tensor:
        return self._files.shards(name)[0]

    def model(self) -> HFCausalLM:
        return self._model

    @cached_property
    def _model(self) -> HFCausalLM:
        return load_folder(self.path)

    def tokens(self, data: str | None, sequences: int, *, trains: bool = False) -> Iterable[tuple[Tensor, Tensor]]:
        first, last = prepare(data or "stdlib", self.tokenizer).split(self.seq_len)
        tokens = first if trains else last
        return heldout_batches(tokens, seq_len=self.seq_len, micro_batch=MICRO_BATCH, max_sequences=sequences)

    def write_tokenizer(self, folder: Path) -> None:
        copy_tokenizer(self.path, folder)


class SavedModel:
    """The last checkpoint of a run, whose tensors are read one at a time."""

    def __init__(self, path: str) -> None:
        self.run = open_run(path)
        self.settings, self.weights = described(self.run)
        self.tokenizer, self.seq_len = self.run.tokenizer, self.run.config.seq_len

    def names(self) -> Iterable[str]:
        return self.weights

    def tensor(self, name: str) -> Tensor:
        return self.weights[name]

    def model(self) -> nn.Module:
        return StreamedModel(self.run.model, self.run.weights.__getitem__, keeps=True)

    def tokens(self, data: str | None, sequences: int, *, trains: bool = False) -> Iterable[tuple[Tensor, Tensor]]:
        return sequences_of(self.run, data, sequences, trains)

    def write_tokenizer(self, folder: Path) -> None:
        write_tokenizer(self.run.config.tokenizer, self.run.config.seq_len, folder)


def training_command(folder: str) -> str:
    """The command that trains a folder of transformers, with flags where defaults do not fit it."""
    import transformers

    path, words = Path(folder), ["thinwire", "train", "--model", f"{FOLDER}{folder}"]
    usual = load_tokenizer(DEFAULTS.tokenizer).vocab_size
    if (path / "tokenizer.json").is_file() and load_tokenizer(folder).vocab_size != usual:
        words += ["--tokenizer", folder]
    limit = longest(transformers.AutoConfig.from_pretrained(path, local_files_only=True))
    if limit is not None and limit < DEFAULTS.seq_len:
        words += ["--seq-len", str(limit)]
    return shlex.join(words)


def load_folder(folder: Path) -> HFCausalLM:
    """The model that config.json names, in fp32 and evaluation mode. Raises ConfigError for weights that do not fit."""
    import transformers

    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = next(iter(settings.get("architectures") or []), "AutoModelForCausalLM")
    loader: Any = getattr(transformers, name, None)
    if loader is None:
        raise ConfigError(f"{folder}: transformers {transformers.__version__} has no {name}")
    if (folder / PACKED).is_file():
        model = loader(transformers.AutoConfig.from_pretrained(folder, local_files_only=True)).float().eval()
        read_packed(model, folder)
        return HFCausalLM(model, longest(model.config) or LONGEST)
    model, odd = load_strictly(loader, folder)
    if odd:
        raise ConfigError(f"{folder}: its weights differ from those that {name} needs: {', '.join(odd)}")
    return HFCausalLM(model, longest(model.config) or LONGEST)
