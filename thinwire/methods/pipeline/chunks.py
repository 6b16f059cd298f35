"""The chunks of a model that is cut: layers of its own, and stand-ins for all others."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class InputModule(NamedTuple):
    """A module with parameters before the layers: features of its output, and whether these are a new dimension."""

    name: str
    features: int
    widens: bool


class Vocabulary(NamedTuple):
    """The modules whose rows are spread over all ranks; each has a row for each of `size` tokens.

    head: name of the Linear that returns the logits. padding: a token whose embedding is not trained.
    """

    embedding: InputModule
    head: str
    size: int
    padding: int | None


@dataclass(frozen=True)
class Cut:
    """A model, and the number of layers in each chunk, in order.

    The first chunk may be the embedding, the last the head.

    Attributes:
        home: the rank of each chunk; one stage per rank.
        layers: name of the module list.
        front: modules with parameters that run before the layers.
        back: names of the modules that run after the layers.
        features, dtype: of the hidden state.
        returns: number of values that a layer returns; 0 for a plain tensor.
        vocabulary: set if embedding and head are spread over all ranks and in no chunk.
    """

    model: nn.Module
    sizes: tuple[int, ...]
    home: tuple[int, ...]
    layers: str
    front: tuple[InputModule, ...]
    back: tuple[str, ...]
    features: int
    dtype: torch.dtype
    returns: int
    vocabulary: Vocabulary | None = None

    @property
    def num_chunks(self) -> int:
        return len(self.sizes)

    def chunk(self, number: int) -> Chunk:
        """A module with the layers of one chunk, which are the model's own. Chunks of one model share tied weights."""
        return Chunk(self, number)

    def names_of(self, chunk: int) -> list[str]:
        """The modules of one chunk: its layers, for the first chunk those before, for the last those after."""
        names = self.layers_of(chunk)
        names += [front.name for front in self.front] if chunk == 0 else []
        return names + (list(self.back) if chunk == self.num_chunks - 1 else [])

    def layers_of(self, chunk: int) -> list[str]:
        """The layers of one chunk."""
        first = sum(self.sizes[:chunk])
        return [f"{self.layers}.{index}" for index in range(first, first + self.sizes[chunk])]

    def span(self, chunk: int) -> str:
        """The layers of one chunk in words."""
        names = self.layers_of(chunk)
        if not names:
            return "the embedding" if chunk == 0 else "the head"
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    @property
    def spread_names(self) -> list[str]:
        """The modules that are on all ranks."""
        return [] if self.vocabulary is None else [self.vocabulary.embedding.name, self.vocabulary.head]

    def stand_ins(self, kept: Collection[str]) -> dict[str, nn.Module]:
        """Modules without weights, in place of all modules in chunks except those in `kept`."""
        names = [name for chunk in range(self.num_chunks) for name in self.names_of(chunk)] + self.spread_names
        names = [name for name in names if name not in kept]
        fronts, behind = {front.name: front for front in self.front}, set(self.back)
        if self.vocabulary is not None:
            fronts[self.vocabulary.embedding.name] = self.vocabulary.embedding
            behind.add(self.vocabulary.head)
        found: dict[str, nn.Module] = {}
        for name, module in ((name, self.model.get_submodule(name)) for name in names):
            returns = 0 if name in behind else self.returns
            found[name] = _Zeros(module, fronts[name]) if name in fronts else _PassOn(module, returns)
        return found

    def reduce_to(self, chunks: Collection[int], borrowed: Collection[nn.Parameter] = ()) -> None:
        """Drop all weights from the model itself except those of some chunks, which must have been made before.

        Modules that are on all ranks stay as they are. borrowed: weights of other ranks; a module with only such
        weights stays only in its chunk.
        """
        not_own = {id(param) for param in borrowed}
        names = [name for chunk in chunks for name in self.names_of(chunk)]
        own = {name: list(self.model.get_submodule(name).parameters()) for name in names}
        kept = [name for name, params in own.items() if not params or any(id(param) not in not_own for param in params)]
        for name, module in self.stand_ins([*kept, *self.spread_names]).items():
            self.model.set_submodule(name, module)

    def shape(self, chunk: int, micro_batch: tuple[Tensor, Tensor | None]) -> tuple[int, int, int]:
        """The shape [batch, seq, features] of the hidden state after a chunk."""
        batch, length = micro_batch[0].shape
        return batch, length, self.features

    def tied(self, home: Sequence[int], rank: int) -> dict[int, list[nn.Parameter]]:
        """By rank, this rank's copies of weights that the other rank also has; their gradients belong to one weight.

        home: the rank of each chunk in the plan that runs. A weight is tied if modules before and after the layers
        share it.
        """
        ends = (home[0], home[-1])
        if rank not in ends or ends[0] == ends[1]:
            return {}
        before, after = (self._parameters(names) for names in ([front.name for front in self.front], self.back))
        shared = [param for key, param in before.items() if key in after and param.requires_grad]
        return {ends[1] if rank == ends[0] else ends[0]: shared} if shared else {}

    def _parameters(self, names: Sequence[str]) -> dict[int, nn.Parameter]:
        owners = [self.model.get_submodule(name) for name in names]
        return {id(param): param for owner in owners for param in owner.parameters(recurse=False)}


class Chunk(nn.Module):
    """Some consecutive layers of a model. The first chunk embeds; the last has the head and the loss.

    Called with (hidden state or None, (tokens [batch, seq], targets or None)), it returns the next hidden state; at the
    end the mean loss of the micro-batch, or logits without targets. The model's own forward runs, so masks and
    positions are the model's: layers of other chunks pass the hidden state on, other chunks' embeddings return zeros,
    and the first own layer gets the received state. If the vocabulary is spread over all ranks, the first chunk
    receives the embedding, and the last returns the input of its head.
    """

    def __init__(self, cut: Cut, number: int) -> None:
        super().__init__()
        self.is_first, self.is_last = number == 0, number == cut.num_chunks - 1
        self.gives_loss = self.is_last and cut.vocabulary is None
        own = cut.names_of(number)
        self.model = copy_of(cut.model, own, cut.stand_ins(own))
        layers = self.model.get_submodule(cut.layers)
        assert isinstance(layers, nn.ModuleList)
        first, size = sum(cut.sizes[:number]), cut.sizes[number]
        # Ends alone: a head takes what arrived from the last of the layers that pass on, an embedding leaves it there.
        if cut.vocabulary is not None and self.is_first:
            self.model.get_submodule(cut.vocabulary.embedding.name).register_forward_hook(self._embed)
        else:
            layers[first if size else -1].register_forward_pre_hook(self._take, with_kwargs=True)
        behind = None if cut.vocabulary is None or not self.is_last else self.model.get_submodule(cut.vocabulary.head)
        (behind or layers[first + size - 1]).register_forward_hook(self._keep)
        self._runs = False
        self._arrived: Tensor | None = None
        self._left: Tensor | None = None

    def forward(self, hidden: Tensor | None, micro_batch: tuple[Tensor, Tensor | None]) -> Tensor:
        tokens, targets = micro_batch
        self._runs, self._arrived = True, hidden
        try:
            output = self.model(tokens, targets) if self.gives_loss else self.model(tokens)
            left = self._left
        finally:
            self._runs, self._arrived, self._left = False, None, None
        if self.gives_loss:
            return output
        assert left is not None
        return left

    def _take(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._arrived is None:
            return None
        if args:
            return (self._arrived, *args[1:]), kwargs
        return args, kwargs | {_name_of_hidden(kwargs): self._arrived}

    def _embed(self, embedding: nn.Module, args: Any, output: Any) -> Tensor | None:
        return self._arrived

    def _keep(self, layer: nn.Module, args: Any, output: Any) -> None:
        # The layer is the whole model's, too.
        if self._runs:
            self._left = output[0] if isinstance(output, tuple) else output


def copy_of(model: nn.Module, shared: Sequence[str], others: Mapping[str, nn.Module]) -> nn.Module:
    """The model with the same tensors in new modules. Some are shared, others replaced by stand-ins."""
    same = [*model.parameters(), *model.buffers(), *map(model.get_submodule, shared)]
    instead = {id(model.get_submodule(name)): module for name, module in others.items()}
    return copy.deepcopy(model, {id(each): each for each in same} | instead)


def _name_of_hidden(kwargs: Mapping[str, Any]) -> str:
    return next((name for name, value in kwargs.items() if isinstance(value, Tensor) and value.ndim == 3), "")


class _StandIn(nn.Module):
    """Replaces a module of another chunk: it has no weights, but the attributes that the model may read."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # Some models ask a layer what kind it is, to choose its mask, or a head for the dtype of its weights.
        public = {name: value for name, value in vars(original).items() if name != "forward" and name[0] != "_"}
        self.__dict__.update(public)
        for name, param in original.named_parameters(recurse=False):
            self.__dict__[name] = torch.empty(0, dtype=param.dtype, device=param.device)


class _PassOn(_StandIn):
    """Replaces a layer, or a module after the layers: returns its input."""

    def __init__(self, original: nn.Module, returns: int) -> None:
        super().__init__(original)
        self.returns = returns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs[_name_of_hidden(kwargs)]
        return (hidden, *[None] * (self.returns - 1)) if self.returns else hidden


class _Zeros(_StandIn):
    """Replaces an embedding: returns zeros of the same shape, which no own layer sees."""

    def __init__(self, original: nn.Module, front: InputModule) -> None:
        super().__init__(original)
        self.front, self.dtype = front, next(original.parameters()).dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        shape = given.shape if self.front.widens else given.shape[:-1]
        return torch.zeros(*shape, self.front.features, dtype=self.dtype, device=given.device)
