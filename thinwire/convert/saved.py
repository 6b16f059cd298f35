"""Loads a run from its directory: the model with the weights of the last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Source, choose, nearest_run, step_of
from thinwire.checkpoint.folder import Manifest, folder_of
from thinwire.data import Tokenizer, load_tokenizer
from thinwire.errors import ConfigError, Problems
from thinwire.hosts.offload.hollow import hollow
from thinwire.hosts.offload.room import give_pages_back
from thinwire.islands.optimizer import OUTER
from thinwire.methods.outer.parameters import parameters_in
from thinwire.models import build_model
from thinwire.models.build import build_skeleton
from thinwire.models.hf import shapes_hf
from thinwire.models.kept import KeptValues, held, mask_readers, whole
from thinwire.options import model_table
from thinwire.run.config import TrainConfig
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import read_toml


class WhenAsked(Mapping[str, Tensor]):
    """Tensors by name, each made whenever it is asked for. shapes: of all, known at once."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]], shapes: Mapping[str, torch.Size]) -> None:
        self._makers, self.shapes = dict(makers), dict(shapes)

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def below(self, prefix: str) -> WhenAsked:
        """Those whose names begin with a prefix, without it."""
        own = {name.removeprefix(prefix): name for name in self._makers if name.startswith(prefix)}
        makers = {short: self._makers[name] for short, name in own.items()}
        return WhenAsked(makers, {short: self.shapes[name] for short, name in own.items()})


@dataclass(frozen=True)
class SavedRun:
    """A run's configuration, tokenizer and model (in evaluation mode), and its checkpoint's step and training loss.

    weights: what the model's state_dict has, or would have if its parameters had memory, each shared one once.
    """

    config: TrainConfig
    tokenizer: Tokenizer
    model: nn.Module
    weights: WhenAsked
    step: int
    loss: float | None


def load_run(path: str) -> SavedRun:
    """Load the run in a directory. Raises ConfigError if it holds no run, or no checkpoint yet."""
    return _load(path, is_whole=True)


def open_run(path: str) -> SavedRun:
    """The same, with parameters that have no memory: `weights` reads each whenever it is asked for."""
    return _load(path, is_whole=False)


def _load(path: str, *, is_whole: bool) -> SavedRun:
    run_dir, problems = RunDir(path), Problems()
    if not run_dir.config().is_file():
        is_exported = (Path(path) / "config.json").is_file()
        raise ConfigError(f"{path} holds no run{f'; nearest: hf:{path}' if is_exported else nearest_run(Path(path))}")
    config = read_toml(run_dir.config(), problems)
    problems.raise_any()
    tokenizer = load_tokenizer(config.tokenizer)
    fields = config.tables.get(model_table(config.model) or "") or {}
    size = config.model, tokenizer.vocab_size, config.seq_len
    model = build_model(*size, config.seed, fields) if is_whole else without_memory(*size, fields)
    step, weights = full_weights(run_dir)
    if not is_whole and config.model.startswith("hf:"):
        weights = unpruned(weights, Path(config.model.removeprefix("hf:")).expanduser(), model)
    wanted = {name: param.shape for name, param in model.named_parameters()}
    odd = [name for name, shape in wanted.items() if weights.shapes.get(name) != shape]
    if odd := odd or sorted(weights.shapes.keys() - model.state_dict().keys()):
        raise ConfigError(
            f"{run_dir.checkpoints} does not fit the model {config.model} that {run_dir.config()} names: "
            f"{odd[0]} differs"
        )
    model.load_state_dict({name: weights[name] for name in weights if name not in wanted}, strict=False)
    if is_whole:
        for name, param in model.named_parameters():
            param.data = weights[name].to(param.dtype)
        whole(model)
    shapes = {name: tensor.shape for name, tensor in held(model).items()}
    own: Callable[[str], Tensor] = partial(_tensor_of, model)
    makers = {name: partial(weights.__getitem__ if name in wanted and not is_whole else own, name) for name in shapes}
    every = WhenAsked(makers, shapes)
    loss = Manifest.read(folder_of(run_dir.checkpoints, step)).loss
    return SavedRun(config, tokenizer, model.eval(), every, step, loss)


def _tensor_of(model: nn.Module, name: str) -> Tensor:
    """What a model has now under that name: a tensor that is kept here would outlive the model's own memory."""
    return held(model)[name]


def without_memory(model: str, vocab_size: int, seq_len: int, fields: Mapping[str, Any]) -> nn.Module:
    """The model of `build_model`, with parameters that have no memory; matrices of a pruned one are whole."""
    give_pages_back()
    if not model.startswith("hf:"):
        return hollow(build_skeleton(model, vocab_size, seq_len, fields))
    return hollow(shapes_hf(model.removeprefix("hf:"), vocab_size, seq_len, fields).float())


def unpruned(weights: WhenAsked, folder: Path, model: nn.Module) -> WhenAsked:
    """The weights of a run that began with a folder: those of which it kept some values are whole, with zeros.

    model: of transformers, with whole matrices.
    """
    whole_shapes = {name: param.shape for name, param in model.named_parameters()}
    makers = {name: partial(weights.__getitem__, name) for name in weights}
    shapes = weights.shapes
    readers = mask_readers(folder, {name.removeprefix("model."): shape for name, shape in whole_shapes.items()})
    for short, read in readers.items():
        name = f"model.{short}"
        place, _, own = name.rpartition(".")
        kept = f"{place}.parametrizations.{own}.original"
        if kept in makers and name in whole_shapes:
            makers[name] = partial(_whole_of, makers.pop(kept), read)
            shapes = {**shapes, name: whole_shapes[name]}
    return WhenAsked(makers, {name: shapes[name] for name in makers})


def _whole_of(kept: Callable[[], Tensor], mask: Callable[[], Tensor]) -> Tensor:
    return KeptValues(mask())(kept())


def full_weights(run_dir: RunDir) -> tuple[int, WhenAsked]:
    """The step of a run's last sound checkpoint and its whole fp32 weights by name, with buffers and frozen parameters.

    With a sharded optimizer these are its fp32 masters, before any rounding for communication. With islands they are
    the outer parameters, which all islands share. Raises ConfigError if there is no checkpoint, CheckpointError if none
    is sound.
    """
    # The run may still train and save.
    folder, wrong = choose(run_dir.checkpoints, moves_pointer=False)
    for why in wrong:
        print(f"thinwire: a checkpoint is passed over: {why}", file=sys.stderr)
    if folder is None:
        raise ConfigError(f"{run_dir.path} holds no checkpoint yet")
    source = Source(folder, 0)
    here: dict[str, Tensor] = source.own("trainer", rank=0)["buffers"]
    if outer := source.own(OUTER, rank=0):
        here |= parameters_in(outer, source.common["shapes"])
    makers = {name: partial(source.weight, name) for name in source.shapes}
    makers |= {name: partial(here.__getitem__, name) for name in here}
    return step_of(folder), WhenAsked(makers, source.shapes | {name: tensor.shape for name, tensor in here.items()})
