"""Loads a run from its directory: the model with the weights of the last checkpoint."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from thinwire.checkpoint import Source, choose, nearest_run, step_of
from thinwire.checkpoint.folder import Manifest, folder_of
from thinwire.data import Tokenizer, load_tokenizer
from thinwire.errors import ConfigError, Problems
from thinwire.islands.optimizer import OUTER
from thinwire.methods.outer.parameters import parameters_in
from thinwire.models import build_model
from thinwire.models.kept import whole
from thinwire.options import model_table
from thinwire.run.config import TrainConfig
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import read_toml


@dataclass(frozen=True)
class SavedRun:
    """A run's configuration, tokenizer and model (in evaluation mode), and its checkpoint's step and training loss."""

    config: TrainConfig
    tokenizer: Tokenizer
    model: nn.Module
    step: int
    loss: float | None


def load_run(path: str) -> SavedRun:
    """Load the run in a directory. Raises ConfigError if it holds no run, or no checkpoint yet."""
    run_dir, problems = RunDir(path), Problems()
    if not run_dir.config().is_file():
        raise ConfigError(f"{path} holds no run{nearest_run(Path(path))}")
    config = read_toml(run_dir.config(), problems)
    problems.raise_any()
    tokenizer = load_tokenizer(config.tokenizer)
    fields = config.tables.get(model_table(config.model) or "")
    model = build_model(config.model, tokenizer.vocab_size, config.seq_len, config.seed, fields)
    step, weights = full_weights(run_dir)
    wanted = {name: param.shape for name, param in model.named_parameters()}
    odd = [name for name, shape in wanted.items() if name not in weights or weights[name].shape != shape]
    if odd := odd or model.load_state_dict(weights, strict=False).unexpected_keys:
        raise ConfigError(
            f"{run_dir.checkpoints} does not fit the model {config.model} that {run_dir.config()} names: "
            f"{odd[0]} differs"
        )
    whole(model)
    loss = Manifest.read(folder_of(run_dir.checkpoints, step)).loss
    return SavedRun(config, tokenizer, model.eval(), step, loss)


def full_weights(run_dir: RunDir) -> tuple[int, dict[str, Tensor]]:
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
    weights = source.own("trainer", rank=0)["buffers"] | dict(source.weights())
    if outer := source.own(OUTER, rank=0):
        weights |= parameters_in(outer, source.common["shapes"])
    return step_of(folder), weights
