"""Imports another program's checkpoint as a folder that `--model hf:DIR` starts from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.checkpoint.foreign import FORMATS, Sizes, consolidate, detect
from thinwire.checkpoint.weights_folder import new_folder, write_weights
from thinwire.convert.mixture import in_files
from thinwire.convert.options import ImportConfig
from thinwire.convert.tokenizer import copy_beside
from thinwire.errors import ConfigError, Problems, first_few, nearest, similar
from thinwire.models.hf import refuse_pickles, skeleton_hf

CONFIG = "config.json"
# Model families that the tables of rules cover.
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Imported:
    """Result of an import: the found format and the written model."""

    format: str
    num_tensors: int
    num_parameters: int
    architecture: str


def import_checkpoint(config: ImportConfig) -> Imported:
    """Write the folder, with the names and shapes of the transformers model that config.json describes.

    Raises ConfigError for an incomplete checkpoint, an unknown format, or a model that differs from config.json.
    """
    source = Path(config.source)
    if not source.is_dir():
        close = similar(source.name, [path.name for path in source.parent.glob("*/")])
        raise ConfigError(f"{source}: no such folder{close or '; give the folder that holds the checkpoint'}")
    if config.format == "hf" or not any(known.fits(source) for known in FORMATS.values()):
        refuse_pickles(source)
    problems = Problems()
    name = problems.note(format_of, source, config.format)
    config_file = problems.note(find_config, source, config.config)
    settings = problems.note(read_config, config_file) if config_file is not None else None
    problems.raise_any()
    assert name is not None and config_file is not None and settings is not None
    known = FORMATS[name]
    with new_folder(Path(config.folder)) as folder, families_named(settings, config.source, name):
        rules = known.rules(Sizes.from_config(settings))
        (folder / CONFIG).write_text(json.dumps(settings | {"torch_dtype": "float32"}, indent=2) + "\n")
        shapes = write_weights(folder, consolidate(known.open(source), rules))
        check_fits(folder, shapes)
        copy_tokenizer(config_file.parent, folder)
    num_parameters = sum(shape.numel() for shape in shapes.values())
    architecture = ", ".join(settings.get("architectures") or [str(settings.get("model_type"))])
    return Imported(name, len(shapes), num_parameters, architecture)


def format_of(source: Path, stated: str) -> str:
    """The name of the folder's format. Raises ConfigError if it can't be told, or if the stated one is unknown."""
    name = detect(source) if stated == "auto" else stated
    if name not in FORMATS:
        raise ConfigError(f"--format {name}: no such format{nearest(name, [*FORMATS, 'auto'])}")
    return name


@contextmanager
def families_named(settings: Mapping[str, Any], source: str, format_name: str) -> Iterator[None]:
    """Add to an error about another model family which families can be imported, and how to train the others."""
    try:
        yield
    except ConfigError as error:
        family = settings.get("model_type")
        if family is None or family in FAMILIES:
            raise
        why = f"import reads models of the families {', '.join(FAMILIES)}, and {source} is of {family}"
        rest = f"; it needs no import: thinwire train --model hf:{source}" if format_name == "hf" else ""
        raise ConfigError(f"{why}{rest} ({error})") from error


def find_config(source: Path, stated: str | None) -> Path:
    """The model's config.json. Raises ConfigError if there is none."""
    path = Path(stated) if stated else source / CONFIG
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: name the model's config.json, in Hugging Face's form, with --config FILE"
        )
    return path


def read_config(path: Path) -> dict[str, Any]:
    """The settings, without the weights' dtype, which is set anew."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold an object, not a {type(settings).__name__}")
    return {key: value for key, value in settings.items() if key not in ("dtype", "torch_dtype")}


def check_fits(folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    """Raise ConfigError unless names and shapes match the model that config.json describes."""
    model = skeleton_hf(str(folder), 0, 0, {}).model
    wanted = in_files({name: param.shape for name, param in model.named_parameters()})
    if missing := sorted(wanted.keys() - shapes.keys()):
        raise ConfigError(f"the checkpoint lacks {first_few(missing)}, which the model of config.json has")
    if unknown := sorted(shapes.keys() - wanted.keys()):
        raise ConfigError(f"the checkpoint has {first_few(unknown)}, which the model of config.json does not have")
    odd = [
        f"{name} is {tuple(shapes[name])}, not {tuple(wanted[name])}" for name in wanted if shapes[name] != wanted[name]
    ]
    if odd:
        raise ConfigError(f"the checkpoint does not fit config.json: {first_few(odd)}")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer beside the model's config.json, if there is one."""
    if (source / "tokenizer.json").is_file():
        shutil.copy(source / "tokenizer.json", folder / "tokenizer.json")
        copy_beside(source, folder)
