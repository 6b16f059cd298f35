"""Modules whose matrix is cut into tiles: parameters of their own, used one after another, under the matrix's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError


class Tile(nn.Linear):
    """A tile of a Linear, [rows, columns]; the whole module saves and loads it."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)

    def _save_to_state_dict(self, *_: Any) -> None:
        """Does nothing."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """Does nothing."""


class Strip(nn.Embedding):
    """Some rows of an embedding; the whole module saves and loads them."""

    def __init__(self, weight: nn.Parameter, padding_idx: int | None, by_frequency: bool) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq, self.sparse = by_frequency, False
        self.weight = weight

    def _save_to_state_dict(self, *_: Any) -> None:
        """Does nothing."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """Does nothing."""


class Tiled(nn.Module):
    """A module with a grid of tiles in place of its weight. In a state dict it looks as if it were whole."""

    def take(self, grid: Sequence[Sequence[nn.Module]]) -> None:
        """Hold these tiles in place of the whole weight and bias."""
        for name in ("weight", "bias"):
            self._parameters.pop(name, None)
        for at, row in enumerate(grid):
            for inside, tile in enumerate(row):
                self.add_module(f"tile{at}_{inside}", tile)
        self._shape = len(grid), len(grid[0])

    def rows(self) -> list[list[Any]]:
        """The tiles, by rows of the grid."""
        height, width = self._shape
        return [[self._modules[f"tile{at}_{inside}"] for inside in range(width)] for at in range(height)]

    @property
    def weight(self) -> Tensor:
        """The whole weight, put together: a copy."""
        return torch.cat([torch.cat([tile.weight for tile in row], 1) for row in self.rows()])

    @property
    def bias(self) -> Tensor | None:
        """The whole bias, put together: a copy."""
        own = [bias for row in self.rows() if (bias := getattr(row[-1], "bias", None)) is not None]
        return torch.cat(own) if own else None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name in ("weight", "bias"):
            if (whole := getattr(self, name)) is not None:
                destination[prefix + name] = whole if keep_vars else whole.detach()

    @torch.no_grad()
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        parts = {"weight": [[tile.weight for tile in row] for row in self.rows()]}
        if getattr(self.rows()[0][-1], "bias", None) is not None:
            parts["bias"] = [[row[-1].bias] for row in self.rows()]
        for name, grid in parts.items():
            if (given := state_dict.get(prefix + name)) is None:
                missing += [prefix + name] if strict else []
                continue
            heights, widths = [len(row[0]) for row in grid], [part.shape[-1] for part in grid[0]]
            shape = [sum(heights), *([sum(widths)] if given.dim() == 2 else [])]
            if list(given.shape) != shape:
                errors.append(f"size mismatch for {prefix + name}: {list(given.shape)}, and the tiles have {shape}")
                continue
            for row, values in zip(grid, given.split(heights), strict=True):
                for part, own in zip(row, values.split(widths, 1) if given.dim() == 2 else [values], strict=True):
                    part.copy_(own)


class TiledLinear(Tiled):
    """x W^T + b, with W in a grid: one tile after another, y_o = sum_i x_i W_oi^T, and the bias with the last i.

    Source: Rajbhandari et al., "ZeRO-Infinity" (SC 2021), section 5.1.3.
    """

    out_features: int
    in_features: int

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., in] to [..., out]."""
        rows = self.rows()
        parts = x.split([tile.in_features for tile in rows[0]], -1) if len(rows[0]) > 1 else [x]
        found = []
        for row in rows:
            own = row[0](parts[0])
            for tile, part in zip(row[1:], parts[1:], strict=True):
                own = own + tile(part)
            found.append(own)
        return torch.cat(found, -1)

    @property
    def strips(self) -> list[nn.Linear]:
        """The tiles as Linears of consecutive outputs. Raises ConfigError if inputs are cut, too."""
        if self._shape[1] > 1:
            raise ConfigError(
                f"loss cut over a head whose inputs are cut into {self._shape[1]} parts: a tile has parts of logits, "
                f"and no logit; nearest: --residency.tile lm_head=1x{self._shape[0] * self._shape[1]}"
            )
        return [row[0] for row in self.rows()]


class TiledEmbedding(Tiled):
    """An embedding whose rows lie in several tiles. Those without a token of the batch get a gradient of zeros."""

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of tokens [...]: [..., width]."""
        flat, first, found, places = tokens.reshape(-1), 0, list[Tensor](), list[Tensor]()
        for (strip,) in self.rows():
            at = ((flat >= first) & (flat < first + strip.num_embeddings)).nonzero()[:, 0]
            found.append(strip(flat[at] - first))
            places.append(at)
            first += strip.num_embeddings
        order = torch.cat(places).argsort()
        if len(order) < len(flat):
            raise IndexError(f"a token that none of the {first} rows has")
        return torch.cat(found)[order].view(*tokens.shape, -1)
