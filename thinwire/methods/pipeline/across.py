"""Which of two dimensions of ranks crosses nodes: the stages of a pipeline, or the replicas of a stage."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import ConfigError

AUTO, STAGES, REPLICAS = "auto", "stages", "replicas"


def ranks_across(across: str, num_ranks: int, stages: int, tensor: int = 1) -> Tensor:
    """The rank in each place of a mesh: int64 [stages, replicas, tensor].

    across: with "stages", and with "auto", replicas of a stage are neighbours, so that the stages lie on different
    nodes; with "replicas" the stages of a pipeline are. Ranks of a tensor axis always are.
    """
    ranks = torch.arange(num_ranks)
    if across == REPLICAS:
        return ranks.view(-1, stages, tensor).transpose(0, 1).contiguous()
    return ranks.view(stages, -1, tensor)


def check_across(across: str, found: Tensor) -> None:
    """Raise ConfigError if a mesh was laid out in another way than `across` states.

    found: its ranks, in the order of the axes pipeline, data and tensor.
    """
    stages, replicas, tensor = (*found.shape, 1)[:3]
    if across == AUTO or min(stages, replicas) == 1:
        return
    places = torch.searchsorted(found.flatten().sort().values, found.contiguous()).view(stages, replicas, tensor)
    if not torch.equal(places, ranks_across(across, found.numel(), stages, tensor)):
        other = REPLICAS if across == STAGES else STAGES
        raise ConfigError(
            f"across {across!r}: the ranks of the mesh lie otherwise, {found.flatten().tolist()}; nearest: across "
            f"{other!r}, or thinwire.pipeline, which makes the mesh"
        )
