"""A model without memory, cut into the stages of a pipeline as a run cuts it."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

from thinwire.methods.pipeline.balance import balanced
from thinwire.methods.pipeline.cut import SPREAD, stated_sizes
from thinwire.methods.pipeline.options import Pipeline
from thinwire.methods.pipeline.vocabulary import Own
from thinwire.models import Llama
from thinwire.planner.forward import layer_and_ends


def cut_parts(
    model: Llama, options: Pipeline, stages: int, seq_len: int, tensor: int = 1
) -> tuple[list[nn.ModuleDict], tuple[int, ...]]:
    """Each stage's part of the model, and each chunk's number of layers. tensor: see `stages_of`."""
    home, layers = options.home(stages), list(model.model.layers)
    embedding, head, sizes = model.model.embed_tokens, model.lm_head, sizes_of(model, options, stages, seq_len, tensor)
    parts = [nn.ModuleDict() for _ in range(stages)]
    for chunk, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        parts[home[chunk]][f"layers{chunk}"] = nn.ModuleList(layers[end - size : end])
    if options.head == SPREAD:
        for rank, part in enumerate(parts):
            own = Own.of(rank, stages, len(head.weight))
            part["embedding"], part["head"] = (rows_of(own, each.weight) for each in (embedding, head))
            if head.weight is embedding.weight:
                part["head"] = part["embedding"]
        parts[home[-1]]["norm"] = model.model.norm
        return parts, sizes
    parts[home[0]]["embedding"] = embedding
    if home[-1] == home[0] or head.weight is not embedding.weight:
        parts[home[-1]]["head"] = head
    parts[home[-1]]["norm"] = model.model.norm
    return parts, sizes


def sizes_of(model: Llama, options: Pipeline, stages: int, seq_len: int, tensor: int) -> tuple[int, ...]:
    """Number of layers of each chunk: as stated, or as `methods.pipeline.cut` finds it."""
    layers, chunks = model.model.layers, options.num_chunks(stages)
    if options.layers:
        return options.sizes(stated_sizes(options.layers, chunks, len(layers)))
    layer, ends = layer_and_ends(model.config, seq_len, tensor=tensor)
    operations = [layer.operations] * len(layers)
    numels = [float(sum(param.numel() for param in each.parameters())) for each in layers]
    if options.head != SPREAD:
        at = 0 if options.head == "first" else -1
        operations[at] += ends.operations
        numels[0] += model.model.embed_tokens.weight.numel()
        numels[at] += model.lm_head.weight.numel()
    return options.sizes(balanced(operations, numels, chunks))


def work_of(model: Llama, options: Pipeline, stages: int, seq_len: int, tensor: int = 1) -> list[float]:
    """The share of a micro-batch's operations that each stage computes; together 1. tensor: see `stages_of`."""
    layer, ends = layer_and_ends(model.config, seq_len, tensor=tensor)
    home, found = options.home(stages), [0.0] * stages
    for at, size in zip(home, sizes_of(model, options, stages, seq_len, tensor), strict=True):
        found[at] += size * layer.operations
    for at in range(stages) if options.head == SPREAD else (home[-1],):
        found[at] += ends.operations / (stages if options.head == SPREAD else 1)
    return [each / sum(found) for each in found]


def rows_of(own: Own, weight: torch.Tensor) -> nn.Module:
    """A module with a rank's rows of a weight."""
    return nn.Embedding(own.size, weight.shape[1], _weight=weight.new_empty(own.size, weight.shape[1]))
