"""A pruned model as a folder: pruned, written, loaded again, with the loss before and after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from thinwire.checkpoint.weights_folder import explained, new_folder
from thinwire.convert.export import write_model
from thinwire.convert.foreign import copy_tokenizer
from thinwire.convert.origin import Folder, ModelOrigin, SavedModel, load_folder, open_origin
from thinwire.convert.verify import UnfaithfulError
from thinwire.errors import ConfigError
from thinwire.models.hf import HFCausalLM
from thinwire.models.kept import MASKS, PACKED, masks_in, write_packed
from thinwire.pruning.masks import check
from thinwire.pruning.options import PruneConfig
from thinwire.pruning.prune import Pruned, prune


@dataclass(frozen=True)
class Written:
    """Result of the command: what was pruned, and the held-out loss before and after, in nats."""

    pruned: Pruned
    before: float
    after: float


def write_pruned(config: PruneConfig) -> Written:
    """Prune a copy of the model and write it. Raises ConfigError, and UnfaithfulError if zeros are lost on the way."""
    check(config.method, config.pattern, config.sparsity, config.rounds)
    origin = open_origin(config.source)
    with new_folder(Path(config.out)) as folder:
        model = as_transformers(origin, folder)
        before = loss_of(model, origin, config)
        texts = [tokens for tokens, _ in origin.tokens(config.data, config.samples, trains=True)]
        pruned = prune(
            model.model, texts, sparsity=config.sparsity, method=config.method, pattern=config.pattern,
            seed=config.seed, rounds=config.rounds,
        )  # fmt: skip
        with explained(folder):
            if config.packed:
                model.model.config.save_pretrained(folder)
                write_packed(model.model, pruned.masks, folder)
            else:
                model.model.save_pretrained(folder)
                save_file(pruned.masks, folder / MASKS)
        origin.write_tokenizer(folder)
        again = load_folder(folder)
        weights: dict[str, Any] = dict(again.model.named_parameters())
        if odd := [name for name, mask in pruned.masks.items() if bool(weights[name].detach()[~mask].any())]:
            raise UnfaithfulError(f"{odd[0]} has other zeros when it is loaded again; the folder was deleted")
        return Written(pruned, before, loss_of(again, origin, config))


def unpack(folder: str | Path, out: str | Path) -> None:
    """Write a folder of `thinwire prune --packed` as one that transformers loads, with its masks.

    Raises ConfigError for a folder that is not packed, and for `out` if it is not empty.
    """
    packed = Path(folder).expanduser()
    if not (packed / PACKED).is_file():
        raise ConfigError(f"{packed} is not packed: it holds no {PACKED}")
    model = load_folder(packed).model
    with new_folder(Path(out).expanduser()) as whole, explained(whole):
        model.save_pretrained(whole)
        save_file(masks_in(packed, {name: param.shape for name, param in model.named_parameters()}), whole / MASKS)
        copy_tokenizer(packed, whole)


def as_transformers(origin: ModelOrigin, folder: Path) -> HFCausalLM:
    """The origin's model as one of transformers; a run's goes through `folder`."""
    if isinstance(origin, Folder):
        return origin.model()
    assert isinstance(origin, SavedModel)
    write_model(origin.run, torch.float32, folder)
    model = load_folder(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    return model


@torch.no_grad()
def loss_of(model: HFCausalLM, origin: ModelOrigin, config: PruneConfig) -> float:
    """The mean loss on held-out text."""
    total = num_tokens = 0.0
    for tokens, targets in origin.tokens(config.data, config.sequences):
        total += float(model(tokens, targets)) * tokens.numel()
        num_tokens += tokens.numel()
    return total / num_tokens
