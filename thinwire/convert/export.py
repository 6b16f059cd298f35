"""Exports a run as a folder that transformers loads, and compares that folder with the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.checkpoint import nearest_run
from thinwire.checkpoint.weights_folder import new_folder, write_weights
from thinwire.convert.mixture import as_mixtral, hollow_mixture
from thinwire.convert.options import ExportConfig
from thinwire.convert.saved import SavedRun, open_run
from thinwire.convert.streamed import StreamedModel
from thinwire.convert.tokenizer import write_tokenizer
from thinwire.convert.verify import Fidelity, KeptLogits, UnfaithfulError, compare
from thinwire.data import Tokenizer, heldout_batches
from thinwire.device import limit_bytes
from thinwire.errors import ConfigError
from thinwire.hosts.offload.hollow import hollow
from thinwire.hosts.offload.room import give_pages_back
from thinwire.models import HFCausalLM, Llama, MoELlama
from thinwire.models.hf import hollow_hf
from thinwire.models.kept import held
from thinwire.models.mixtral import mixtral_config
from thinwire.run.run import tokens_of
from thinwire.run.run_dir import RunDir

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MICRO_BATCH = 4


@dataclass(frozen=True)
class Exported:
    """Result of an export: the written model, and its agreement with the run."""

    step: int
    num_parameters: int
    architecture: str
    fidelity: Fidelity


def export(config: ExportConfig) -> Exported:
    """Write the folder, load it with transformers, and compare. If they differ, delete the folder.

    Weights are written one at a time. Of both models one is in memory at a time, or, where memory is limited, one
    weight, which is read whenever it is used.

    Raises ConfigError for a run that can't be read or a folder that is in use. Raises UnfaithfulError if the tokenizer
    or the model that transformers loads differs from the run's.
    """
    check_transformers()
    check_is_run(config.run)
    run = open_run(config.run)
    keeps = limit_bytes() is None and run.config.memory is None
    given = run, config.data, config.sequences
    texts = [tokens for tokens, _ in sequences_of(*given, micro_batch=MICRO_BATCH if keeps else 1)]
    with new_folder(Path(config.folder)) as folder:
        write_model(run, DTYPES[config.dtype], folder)
        write_tokenizer(run.config.tokenizer, run.config.seq_len, folder)
        check_tokenizer(folder, run.tokenizer, texts)
        with TemporaryDirectory(dir=folder) as kept:
            ours = KeptLogits(StreamedModel(run.model, run.weights.__getitem__, keeps=keeps), texts, Path(kept))
            theirs, read = reload(folder, keeps=keeps)
            fidelity = compare(ours, StreamedModel(theirs, read, keeps=keeps), texts)
        fidelity.check(config.max_kl, config.min_agreement)
    return Exported(run.step, theirs.num_parameters, type(theirs.model).__name__, fidelity)


def check_is_run(source: str) -> None:
    """Raise ConfigError for a folder of transformers."""
    path = Path(source.removeprefix("hf:"))
    if not RunDir(path).config().is_file() and (path / "config.json").is_file():
        raise ConfigError(f"{source} is a model of transformers already: export takes a run{nearest_run(path)}")


def check_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError(
            "export loads its result with transformers, which is missing: pip install -e '.[hf]' in thinwire's folder"
        ) from None


def sequences_of(
    run: SavedRun, data: str | None, sequences: int, trains: bool = False, micro_batch: int = MICRO_BATCH
) -> Iterator[tuple[Tensor, Tensor]]:
    """Evenly spaced (tokens, targets) of the run's data or of other `data`, int64 [<= micro_batch, seq_len] each.

    trains: those of the training part, in place of the held-out one.
    """
    first, last = tokens_of(run.config, run.tokenizer, data).split(run.config.seq_len)
    tokens = first if trains else last
    return heldout_batches(tokens, seq_len=run.config.seq_len, micro_batch=micro_batch, max_sequences=sequences)


def write_model(run: SavedRun, dtype: torch.dtype, folder: Path) -> None:
    """config.json and the weights, one at a time."""
    settings, state = described(run)
    settings["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    write_weights(folder, ((name, as_dtype(state[name], dtype)) for name in state))


def described(run: SavedRun) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The run's model as transformers knows it: settings for a config.json, and weights, each shared one once."""
    model: Any = run.model
    if isinstance(model, HFCausalLM):
        settings = model.model.config.to_dict()
        settings.pop("dtype", None)
        return settings, run.weights.below("model.")
    assert isinstance(model, Llama)
    state = as_mixtral(run.weights) if isinstance(model, MoELlama) else run.weights
    return llama_config(model, run.tokenizer), state


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def llama_config(model: Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    """Contents of `config.json` for our Llama-shaped model, in a form for old and new versions of transformers."""
    kind, sizes = "llama", asdict(model.config)
    if isinstance(model, MoELlama):
        kind, sizes = "mixtral", mixtral_config(model.config)
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        **sizes,
        "head_dim": model.config.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # By default transformers takes tokens 1 and 2.
        "bos_token_id": None,
        "eos_token_id": tokenizer.end_of_document,
        "pad_token_id": None,
    }


def check_tokenizer(folder: Path, ours: Tokenizer, texts: list[Tensor]) -> None:
    """Raise UnfaithfulError unless transformers' tokenizer gives the same ids for the held-out text."""
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for text in (ours.decode(row.tolist()) for batch in texts for row in batch):
        expected = np.asarray(ours.encode(text)).tolist()
        found = theirs(text, add_special_tokens=False, verbose=False)["input_ids"]
        if found != expected:
            pairs = zip(found, expected, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
            raise UnfaithfulError(
                f"transformers' tokenizer differs from the run's at token {place} of a held-out text: "
                f"{found[place : place + 4]} where training had {expected[place : place + 4]}; the folder was deleted"
            )


def reload(folder: Path, *, keeps: bool) -> tuple[HFCausalLM, Callable[[str], Tensor]]:
    """The folder's model in fp32, without memory for its weights, and what reads them by name.

    A model of which transformers has other tensors than its files, such as a mixture of experts, is loaded whole by
    transformers, or, unless memory `keeps` it, put together from the matrices of the files. Raises UnfaithfulError for
    weights that do not fit.
    """
    give_pages_back()
    made, stored, _ = hollow_hf(str(folder), 0, 0, {})
    if made is not None and stored is not None:
        if stored.are_all_of({name: tensor.shape for name, tensor in held(made.model).items()}):
            return hollow(made).eval(), stored
    elif not keeps and (streamed := hollow_mixture(folder)) is not None:
        return streamed
    import transformers

    model, odd = load_strictly(transformers.AutoModelForCausalLM, folder)
    if odd:
        raise UnfaithfulError(
            f"the written weights differ from those that transformers needs: {', '.join(odd)}; the folder was deleted"
        )
    return HFCausalLM(model, 0), dict(model.named_parameters()).__getitem__


def load_strictly(loader: Any, folder: Path) -> tuple[Any, list[str]]:
    """A folder's model in fp32 and evaluation mode, and names of weights that do not fit, a few of each kind."""
    model, info = loader.from_pretrained(
        folder, use_safetensors=True, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    odd = [f"{kind.partition('_')[0]} {name}" for kind in kinds for name in islice(info[kind], 3)]
    return model.float().eval(), odd
