"""Chooses the weights that stay: by a score for each, compared within a row."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import ConfigError

METHODS = ("moe-pruner", "wanda", "magnitude", "random", "obs")
PATTERNS = ("rows", "2:4")
GROUP, GROUP_DROPS = 4, 2


def scores(weight: Tensor, norms: Tensor) -> Tensor:
    """|W[..., i, c]| * norms[..., c], fp32, where norms are those of input c over tokens.

    For MoE-Pruner each token counts times its gate. If all norms are zero, as for an expert without a token, the score
    is |W|.

    Shape:
        weight: [..., out, in]. norms: [..., in]. result: as weight.

    Source: "MoE-Pruner: pruning mixture-of-experts large language model using the hints from its router", equation 5;
    Sun et al., "A simple and effective pruning approach for large language models" (Wanda, ICLR 2024).
    """
    norms = torch.where(norms.amax(-1, keepdim=True) > 0, norms, torch.ones_like(norms))
    return weight.detach().abs().float() * norms.float().unsqueeze(-2)


def mask_of(score: Tensor, pattern: str, sparsity: float) -> Tensor:
    """True where a weight stays, bool [..., out, in]. Of equal scores, the later ones stay.

    rows: floor(sparsity * in) of each row are removed. 2:4: two of every four neighbours are removed.
    """
    if pattern == "2:4":
        return lowest(score.unflatten(-1, (-1, GROUP)), GROUP_DROPS).logical_not().flatten(-2)
    return lowest(score, num_removed(score.shape[-1], sparsity)).logical_not()


def lowest(score: Tensor, num: int) -> Tensor:
    """Whether an entry is one of the `num` lowest along the last dimension."""
    order = score.argsort(dim=-1, stable=True)[..., :num]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, True)


def num_removed(width: int, sparsity: float) -> int:
    """floor(sparsity * width), of a row."""
    return int(sparsity * width + 1e-9)


def check(method: str, pattern: str, sparsity: float, rounds: int = 1) -> None:
    """Raise ConfigError for an unknown method or pattern, and a sparsity or rounds that they can't have."""
    for what, value, known in (("method", method, METHODS), ("pattern", pattern, PATTERNS)):
        if value not in known:
            raise ConfigError(f"--{what} {value}: must be one of {', '.join(known)}; nearest: {known[0]}")
    if not 0 < sparsity < 1:
        # Above 1 it is a share in percent.
        close = 0.01 if sparsity <= 0 else sparsity / 100 if 1 < sparsity < 100 else 0.99
        raise ConfigError(f"--sparsity {sparsity:g}: must be above 0 and below 1; nearest: {close:g}")
    if pattern == "2:4" and sparsity != 0.5:
        raise ConfigError(f"--sparsity {sparsity:g}: the pattern 2:4 has 0.5, which is the nearest")
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: must be at least 1; nearest: 1")
    if rounds > 1 and (method != "obs" or pattern == "2:4"):
        why = "the pattern 2:4 has one share" if method == "obs" else f"{method} measures no gradients"
        raise ConfigError(f"--rounds {rounds}: {why}; nearest: --rounds 1")


def check_width(name: str, width: int, pattern: str) -> None:
    """Raise ConfigError for rows that the pattern does not divide."""
    if pattern == "2:4" and width % GROUP:
        raise ConfigError(f"{name} has rows of {width}: the pattern 2:4 needs a multiple of 4; nearest: --pattern rows")
