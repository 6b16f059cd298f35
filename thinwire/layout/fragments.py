"""Fragments: the groups of layers that islands exchange together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from thinwire.errors import ConfigError, nearest
from thinwire.layout.layers import layers_of
from thinwire.layout.layout import Layout

PATTERNS = ("strided", "sequential")
# Layers in one fragment where their number is not stated.
LAYERS_PER_FRAGMENT = 3


def cut(
    model: nn.Module,
    num_fragments: int | None,
    pattern: str,
    block: int,
    whole: Mapping[str, torch.Size] | None = None,
) -> list[Layout]:
    """Divide the trained parameters of `model` into fragments. Every rank gets the same result.

    Layers are the children of its outermost ModuleLists. Parameters in no layer, or in several, belong to fragment 0. A
    tied parameter is counted once.

    Args:
        num_fragments: number P of fragments; None: one for every three layers.
        pattern: "strided": layer l belongs to fragment l mod P; "sequential": each fragment has consecutive layers.
        block: each tensor starts at a multiple of this many elements.
        whole: shapes of parameters of which the model holds only a part.

    Raises ConfigError for an unknown pattern, and for more fragments than layers.
    Source: Douillard et al., "Streaming DiLoCo with overlapping communication" (2025), section 3.1.
    """
    if pattern not in PATTERNS:
        raise ConfigError(f"pattern {pattern!r} of fragments is unknown{nearest(pattern, PATTERNS)}")
    layers = layers_of(model)
    num_layers = max(1, len(layers))
    total = -(-num_layers // LAYERS_PER_FRAGMENT) if num_fragments is None else num_fragments
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not 1 <= total <= num_layers and named:
        raise ConfigError(
            f"num_fragments {total}: must be from 1 to the number of layers, {num_layers}; "
            f"nearest: {min(max(total, 1), num_layers)}"
        )
    users: dict[nn.Parameter, set[int]] = {}
    for number, layer in enumerate(layers):
        for param in layer.parameters():
            users.setdefault(param, set()).add(number)
    shapes: list[dict[str, torch.Size]] = [{} for _ in range(total)]
    for name, param in named.items():
        used_by = users.get(param, set())
        number = next(iter(used_by)) if len(used_by) == 1 else 0
        at = number % total if pattern == "strided" else number * total // num_layers
        shapes[at][name] = (whole or {}).get(name, param.shape)
    return [Layout.of(held, unit=block) for held in shapes]
