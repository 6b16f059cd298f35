"""A folder that transformers can load, written one tensor at a time; complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from thinwire.errors import ConfigError, ThinwireError
from thinwire.tiers.tensor_file import TensorFile

SHARD_BYTES = 2 << 30


class TensorParts(NamedTuple):
    """A tensor that is made some rows at a time. parts: all of its rows in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Iterable[Tensor]


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make a folder under a temporary name and rename it to `target` on success, or delete it on an error.

    Raises ConfigError if `target` already holds something, ThinwireError if it can't be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        number = 2
        while (free := target.with_name(f"{target.name}-{number}")).exists():
            number += 1
        raise ConfigError(f"{target} is there already: delete it, or choose another folder, such as {free}")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with explained(target):
        temporary.mkdir(parents=True)
    try:
        yield temporary
        with explained(target):
            # An empty folder is replaced.
            temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn the errors of a disk into a ThinwireError of one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ThinwireError(f"{folder} can't be written: {getattr(error, 'strerror', None) or error}") from error


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor | TensorParts]], shard_bytes: int = SHARD_BYTES
) -> dict[str, torch.Size]:
    """Write named tensors as .safetensors files of at most `shard_bytes` bytes, or one tensor. Return their shapes.

    One tensor, or part of one, is in memory at a time. If there are several files, `model.safetensors.index.json` lists
    them. Raises ThinwireError if the disk is full.
    """
    shapes: dict[str, torch.Size] = {}
    with explained(folder):
        files = [TensorFile(folder / part_name(0))]
    for name, given in tensors:
        tensor, parts = _told(given)
        with explained(folder):
            last = files[-1]
            if last.names and (last.num_bytes + tensor.nbytes > shard_bytes or not last.takes(name, tensor)):
                last.close()
                files.append(TensorFile(folder / part_name(len(files))))
            files[-1].add(name, tensor, parts)
        shapes[name] = tensor.shape
    with explained(folder):
        files[-1].close()
    name_files(folder, [file.names for file in files], sum(file.num_bytes for file in files))
    return shapes


def _told(given: Tensor | TensorParts) -> tuple[Tensor, Iterable[Tensor] | None]:
    """A tensor of that shape and dtype, and the parts that have its values; None: it has them."""
    if isinstance(given, Tensor):
        return given, None
    return torch.empty(given.shape, dtype=given.dtype, device="meta"), given.parts


def part_name(number: int) -> str:
    return f"part-{number}.tmp"


def name_files(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    """Give the files the names that transformers expects, now that their number is known."""
    if len(files) == 1:
        (folder / part_name(0)).rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / part_name(number)).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
