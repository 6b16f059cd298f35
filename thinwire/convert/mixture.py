"""A mixture between three forms: ours, with a stack of experts; a Mixtral's files; and the model of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from thinwire.convert.saved import WhenAsked
from thinwire.hosts.offload.hollow import hollow
from thinwire.models.hf import HFCausalLM, StoredWeights, shapes_hf
from thinwire.models.kept import held
from thinwire.models.mixtral import mixtral_parts


def as_mixtral(weights: WhenAsked) -> WhenAsked:
    """The weights of a MoELlama in the names and shapes of a Mixtral's files, of which one stack is in memory."""
    last = lru_cache(1)(weights.__getitem__)
    makers, shapes = dict[str, Callable[[], Tensor]](), dict[str, torch.Size]()
    for name, shape in weights.shapes.items():
        for own, take in mixtral_parts(name, shape):
            makers[own] = partial(_taken, last, name, take)
            shapes[own] = take(torch.empty(shape, device="meta")).shape
    return WhenAsked(makers, shapes)


def _taken(read: Callable[[str], Tensor], name: str, take: Callable[[Tensor], Tensor]) -> Tensor:
    return take(read(name))


def parts_in_files(name: str, shape: torch.Size) -> dict[str, tuple[int | slice, ...]]:
    """Which parts of a tensor of transformers' model its files hold, by their names there.

    A Mixtral's experts, packed in transformers 5, are a matrix each in the files.
    """
    prefix, _, kind = name.partition(".mlp.experts.")
    if kind not in ("gate_up_proj", "down_proj"):
        return {name.replace(".mlp.gate.weight", ".block_sparse_moe.gate.weight"): ()}
    num_experts, rows, _ = shape
    halves = {"w1": slice(0, rows // 2), "w3": slice(rows // 2, rows)}
    of_kind = halves if kind == "gate_up_proj" else {"w2": slice(None)}
    numbers = product(range(num_experts), of_kind.items())
    return {f"{prefix}.block_sparse_moe.experts.{n}.{each}.weight": (n, part) for n, (each, part) in numbers}


def in_files(shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Names and shapes of a model of transformers in its files. See `parts_in_files`."""
    return {
        own: torch.empty(shape, device="meta")[place].shape
        for name, shape in shapes.items()
        for own, place in parts_in_files(name, shape).items()
    }


def hollow_mixture(folder: Path) -> tuple[HFCausalLM, Callable[[str], Tensor]] | None:
    """The model of transformers in a folder, without memory, and what reads a weight from the matrices of its files.

    None for a folder with others.
    """
    made = shapes_hf(str(folder), 0, 0, {})
    places = {name: parts_in_files(name, param.shape) for name, param in made.model.named_parameters()}
    kinds = {own: param.dtype for name, param in made.model.named_parameters() for own in places[name]}
    stored = StoredWeights(folder, kinds)
    if not stored.are_all_of(in_files({name: tensor.shape for name, tensor in held(made.model).items()})):
        return None
    stored.fill_buffers(made.float().model)
    shapes = {name: param.shape for name, param in made.model.named_parameters()}

    def read(name: str) -> Tensor:
        short = name.removeprefix("model.")
        found = torch.empty(shapes[short])
        for own, place in places[short].items():
            found[place] = stored(f"model.{own}")
        return found

    return hollow(made).eval(), read
