"""One rank's part of a model that is cut into stages, and how the rest leaves model and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import ConfigError
from thinwire.hosts.offload.hollow import any_values, is_hollow
from thinwire.hosts.pipeline.recovery import Holdings, first_copies
from thinwire.hosts.pipeline.vocabulary import SpreadRows, SpreadVocabulary, spread_rows
from thinwire.hosts.tensor import TensorAxis
from thinwire.methods.pipeline import Chunk, Cut, cut
from thinwire.methods.pipeline.options import Pipeline
from thinwire.methods.pipeline.recover import NONE, SWAP
from thinwire.methods.pipeline.vocabulary import Own

MicroBatch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Any], Tensor]
Initial = Callable[[str], Tensor] | None


def models_own(module: Any, batch: Any) -> Tensor:
    """The loss that the model itself returns."""
    return module(*batch)


class StageChunk(nn.Module):
    """A chunk that is called through the training loop's loss function, which may measure time or cast."""

    def __init__(self, chunk: Chunk, dtype: torch.dtype) -> None:
        super().__init__()
        self.chunk, self.dtype = chunk, dtype
        self.loss: Loss = models_own

    def forward(self, hidden: Tensor | None, micro_batch: tuple[Tensor, Tensor | None]) -> Tensor:
        """See Chunk. The hidden state that it returns has the pipeline's dtype."""
        found: list[Tensor] = []

        def module(*batch: Any) -> Tensor:
            found.append(self.chunk(hidden, batch))
            return found[-1]

        output = self.loss(module, micro_batch)
        if len(found) != 1 or output is not found[0]:
            raise ConfigError(
                "a pipeline computes the model's own loss: `loss` must return the result of `module(*batch)`"
            )
        return output if self.chunk.gives_loss else output.to(self.dtype)


@dataclass(frozen=True)
class StagePart:
    """A rank's part of a model.

    Attributes:
        tied: for each rank, the weights that this rank and that one share.
        holdings, copies: if lost stages are recovered: the parameters of all ranks, and this rank's copies of others'.
        vocabulary: this rank's rows of embedding and head, if all ranks have some.
    """

    options: Pipeline
    made: Cut
    chunks: dict[int, StageChunk]
    tied: dict[int, list[nn.Parameter]]
    num_parameters: int
    num_names: int
    holdings: Holdings
    copies: dict[int, Tensor]
    vocabulary: SpreadVocabulary | None = None

    def local(self, tensor: TensorAxis) -> StagePart:
        """The same after `cut_parameters`, which puts local tensors in the place of DTensors."""
        return replace(self, tied={peer: tensor.local(params) for peer, params in self.tied.items()})

    @property
    def rows(self) -> SpreadRows | None:
        """Which rows of which parameters this rank has."""
        return None if self.vocabulary is None else self.vocabulary.rows

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.made.model.parameters())).device


def take_part(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Pipeline, mesh: DeviceMesh, initial: Initial = None
) -> StagePart:
    """Leave in model and optimizer only the parameters that this rank's stage trains.

    Names stay those of the whole model. initial: gives the first values of parameters without memory, by name; those of
    other stages never get any. Raises ConfigError, before anything is changed, for a model that can't be cut this way.
    """
    stages, rank = mesh.size(), mesh.get_local_rank()
    apart = options.recover == SWAP
    with any_values(model):
        made = cut(model, options.num_chunks(stages), options.layers, options.head, apart=apart)
    made = replace(made, home=options.home(stages))
    options.crossing(0).check(made.features)
    own = [chunk for chunk, home in enumerate(made.home) if home == rank]
    trained = [param for param in model.parameters() if param.requires_grad]
    num_parameters, num_names = sum(param.numel() for param in trained), len(trained)
    chunks = {number: StageChunk(made.chunk(number), made.dtype) for number in own}
    tied = made.tied(made.home, rank)
    holdings = Holdings.of(made)
    check_trained(made, holdings)
    if initial is not None:
        parts = [*(part.chunk for part in chunks.values()), *map(model.get_submodule, made.spread_names)]
        ends = holdings.kept_by(rank) if options.recover != NONE else []
        fill(model, parts, {name for other in ends for name in holdings.ends[other]}, initial)
    copies = first_copies(holdings, model, rank) if options.recover != NONE else {}
    vocabulary: SpreadVocabulary | None = None
    if made.vocabulary is not None:
        rows = spread_rows(made, optimizer, Own.of(rank, stages, made.vocabulary.size))
        vocabulary = SpreadVocabulary(
            *rows, rank=rank, num_ranks=stages, features=made.features, padding=made.vocabulary.padding
        )
    made.reduce_to(own, [param for peer, params in tied.items() if peer < rank for param in params])
    kept = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        dropped = [param for param in group["params"] if id(param) not in kept]
        group["params"] = [param for param in group["params"] if id(param) in kept]
        for param in dropped:
            optimizer.state.pop(param, None)
    return StagePart(options, made, chunks, tied, num_parameters, num_names, holdings, copies, vocabulary)


def fill(
    model: nn.Module, parts: Sequence[nn.Module], others: Collection[str], initial: Callable[[str], Tensor]
) -> None:
    """Give parameters without memory their first values: those of `parts` of a model, and the `others` by name."""
    own = {id(param) for part in parts for param in part.parameters()}
    for name, param in model.named_parameters():
        if (id(param) in own or name in others) and is_hollow(param):
            param.data = initial(name).to(param.device, param.dtype)


def check_trained(made: Cut, holdings: Holdings) -> None:
    """Raise ConfigError, on all ranks, if all parameters of a stage are frozen: it would have nothing to update."""
    # Rows of a vocabulary on all stages are always trained.
    frozen = [rank for rank in range(len(holdings.ends)) if not holdings.trained_by(rank)]
    if not frozen or made.vocabulary is not None:
        return
    layers = {number: f"{made.layers}.{number}" for number in range(sum(made.sizes))}
    trained = [number for number, name in layers.items() if holdings.of_layer(name)]
    stages = len(holdings.ends)
    near = f"{max(1, len(trained))} stages"
    if len(trained) >= stages:
        ends = [trained[len(trained) * (stage + 1) // stages - 1] + 1 for stage in range(stages - 1)]
        near = "layers '" + ",".join(str(b - a) for a, b in pairwise([0, *ends, len(layers)])) + "'"
    raise ConfigError(
        f"stage {frozen[0]} of {stages}: all of its parameters are frozen, and each stage must train some; nearest: "
        f"{near}"
    )
