"""Cut a causal language model into chunks of layers, whatever its architecture."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from thinwire._compat import flop_counter
from thinwire.errors import ConfigError, nearest
from thinwire.methods.pipeline.balance import balanced
from thinwire.methods.pipeline.trial import IGNORED, check_apart, check_logits, check_training
from thinwire.models.modes import evaluating

PROBE = (3, 1, 4, 1, 5, 2, 6, 0)
SPREAD = "spread"
HEADS = ("last", "first", SPREAD)


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
        self.model = _copy_of(cut.model, own, cut.stand_ins(own))
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


def _copy_of(model: nn.Module, shared: Sequence[str], others: Mapping[str, nn.Module]) -> nn.Module:
    """The model with the same tensors in new modules. Some are shared, others replaced by stand-ins."""
    same = [*model.parameters(), *model.buffers(), *map(model.get_submodule, shared)]
    instead = {id(model.get_submodule(name)): module for name, module in others.items()}
    return copy.deepcopy(model, {id(each): each for each in same} | instead)


def token_shares(micro_batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """For each micro-batch, its share of all valid targets: the weight of its mean loss in the mean over all tokens."""
    counts = [int((targets != IGNORED).sum()) for _, targets in micro_batches]
    return [count / max(1, sum(counts)) for count in counts]


def cut(
    model: nn.Module, stages: int, layers: str | Sequence[int] = "", head: str = "last", *, apart: bool = False,
    seq_len: int | None = None,
) -> Cut:  # fmt: skip
    """Cut a causal language model into chunks of consecutive layers, one for each stage.

    The model is run twice on a few tokens, and its chunks once. Of n tokens a layer has a n + b n^2 operations; a and b
    follow from the two runs. Then model and chunks are run in training, with targets and a backward.

    Args:
        model: called as model(tokens, targets=None); returns logits, or the mean loss. Its layers are the nn.ModuleList
            with the most parameters.
        layers: number of layers of each stage, such as "5,6,6,3"; by default such that the slowest stage has the fewest
            floating-point operations and, among such cuts, the largest stage the fewest parameters.
        head: "last": the last stage has it; "first": micro-batches return to the first stage, which has the head as a
            chunk of its own besides the embedding; "spread": no chunk has embedding or head, see Vocabulary.
        apart: embedding and head are chunks of their own, on the first and the last rank.
        seq_len: tokens of a sequence, for which operations are counted; None: `model.max_seq_len`, or, without it, the
            few.

    Raises ConfigError for more stages than layers; for layers that don't add up; for a model whose layers pass on more
    than one hidden state, or whose weights are used in several places; for one that trains otherwise in
    chunks, see check_training; for one with a balance loss; for "spread" also for a model that does more with tokens
    than a look-up, or more with the head's product than the mean cross-entropy.
    """
    if head not in HEADS:
        raise ConfigError(f"head {head!r} is unknown{nearest(head, HEADS)}")
    name, found = layers_of(model)
    if stages > 1 and (weight := getattr(model, "balance_weight", 0.0)):
        raise ConfigError(
            f"the model has a balance loss over the experts of all its layers, weight {weight:g}, and a stage sees "
            "only its own: stages of a mixture need a weight of 0; nearest: router_aux_loss_coef=0"
        )
    if not 1 <= stages <= len(found):
        near = max(1, min(stages, len(found)))
        raise ConfigError(f"{stages} stages of {len(found)} layers: nearest that works: {near}")
    stated = stated_sizes(layers, stages, len(found)) if layers else None
    probe = _Probe(model, name, found, 0 if head == "first" else -1, spread=head == SPREAD)
    length: int = getattr(model, "max_seq_len", len(PROBE)) if seq_len is None else seq_len
    sizes, home = stated or balanced(probe.operations(length), probe.num_parameters, stages), tuple(range(stages))
    if head == "first":
        sizes, home = (*sizes, 0), (*home, 0)
    elif apart:
        sizes, home = (0, *sizes, 0), (0, *home, stages - 1)
    made = Cut(
        model, sizes, home, name, probe.front, probe.back, probe.features, probe.dtype, probe.returns, probe.vocabulary
    )
    check_apart(made)
    # On a copy, so that the model's own layers get no hooks.
    tried = replace(made, model=_copy_of(model, (), {}))
    check_logits(tried, probe.tokens, probe.logits)
    check_training(tried, probe.tokens)
    return made


def layers_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name and the module list of a model's layers: the list with the most parameters. Raises ConfigError."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no nn.ModuleList of layers: nothing to cut")
    return max(lists, key=lambda item: sum(param.numel() for param in item[1].parameters()))


def stated_sizes(layers: str | Sequence[int], stages: int, num_layers: int) -> tuple[int, ...]:
    """The number of layers of each stage. Raises ConfigError for text that can't be read, and for a wrong sum."""
    try:
        sizes = tuple(int(part) for part in (layers.split(",") if isinstance(layers, str) else layers))
    except ValueError:
        raise ConfigError(f"layers {layers!r}: must be whole numbers, such as '5,6,6,3'") from None
    even = ",".join(str(num_layers // stages + (index < num_layers % stages)) for index in range(stages))
    if len(sizes) != stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ConfigError(
            f"layers {','.join(map(str, sizes))}: must be {stages} numbers from 1 up that add up to the model's "
            f"{num_layers} layers; nearest: {even}"
        )
    return sizes


class _Probe:
    """What one forward shows: which modules run before and after the layers, and each layer's cost.

    num_parameters: of each layer; the head's are added to the layer at `head`, the embedding's to the first.
    spread: neither head nor embedding is added to a layer, or listed in `front` and `back`.
    """

    def __init__(self, model: nn.Module, name: str, layers: nn.ModuleList, head: int, *, spread: bool) -> None:
        inside = {id(param) for param in layers.parameters()}
        owners = {
            owner_name: owner
            for owner_name, owner in model.named_modules()
            if any(id(param) not in inside for param in owner.parameters(recurse=False))
        }
        for owner_name in owners:
            if name.startswith(f"{owner_name}.") or not owner_name:
                raise ConfigError(f"{owner_name or 'the model'} has weights of its own around its layers: can't be cut")
        self._calls: list[str] = []
        self._fronts: dict[str, InputModule] = {}
        self._outputs: list[Any] = []
        # What a module before the layers was given, and what a module gave.
        self._seen: dict[str, tuple[Any, Any]] = {}
        device = next(model.parameters()).device
        vocabulary = min(
            (owner.num_embeddings for owner in owners.values() if isinstance(owner, nn.Embedding)), default=8
        )
        self.tokens = torch.tensor([PROBE], device=device) % vocabulary
        watched = {**owners, **{f"{name}.{index}": layer for index, layer in enumerate(layers)}}
        half, whole = flop_counter(), flop_counter()
        self._run(model, {}, half, self.tokens[:, : len(PROBE) // 2])
        self.logits = self._run(model, watched, whole, self.tokens)
        front, self.back = self._sides(owners, name, len(layers))
        self.vocabulary = self._spread(model, owners, front) if spread else None
        if self.vocabulary is not None:
            front = tuple(owner for owner in front if owner != self.vocabulary.embedding.name)
            self.back = tuple(owner for owner in self.back if owner != self.vocabulary.head)
        self.front = tuple(self._fronts[owner] for owner in front)
        hidden, self.returns = _hidden_of(self._outputs)
        self.features, self.dtype = hidden.shape[-1], hidden.dtype
        names = [f"{name}.{index}" for index in range(len(layers))]
        self._counts = [self._counted(counter, names, head) for counter in (half, whole)]
        self.num_parameters = [sum(param.numel() for param in layer.parameters()) for layer in layers]
        for place, side in ((0, front), (head, self.back)):
            self.num_parameters[place] += sum(
                p.numel() for owner in side for p in owners[owner].parameters(recurse=False)
            )

    def operations(self, length: int) -> list[float]:
        """Floating-point operations of each layer in a forward of so many tokens; the head's count as its layer's.

        a n + b n^2, where b is that of attention. It is not below 0 where rounding up to whole blocks hides it.
        """
        num = len(PROBE)
        squares = [max(0.0, (whole - 2 * half) / (num * num / 2)) for half, whole in zip(*self._counts, strict=True)]
        return [
            length * (whole / num - num * square) + length * length * square
            for whole, square in zip(self._counts[1], squares, strict=True)
        ]

    def _counted(self, counter: FlopCounterMode, layers: Sequence[str], head: int) -> list[int]:
        """Operations of each layer in one run."""
        counts = {key.partition(".")[2]: sum(found.values()) for key, found in counter.get_flop_counts().items()}
        found = [counts.get(name, 0) for name in layers]
        found[head] += sum(counts.get(owner, 0) for owner in self.back)
        return found

    def _run(
        self, model: nn.Module, watched: Mapping[str, nn.Module], counter: FlopCounterMode, tokens: Tensor
    ) -> Tensor:
        hooks = [module.register_forward_hook(self._note(name), with_kwargs=True) for name, module in watched.items()]
        try:
            with torch.no_grad(), counter, evaluating(model):
                logits = model(tokens)
        finally:
            for hook in hooks:
                hook.remove()
        if not isinstance(logits, Tensor):
            near = "return logits [batch, seq, vocab], or the mean loss if targets are given"
            if hasattr(logits, "logits"):
                near = "wrap it: HFCausalLM(model, max_seq_len=...) from thinwire.models.hf"
            raise ConfigError(
                f"{type(model).__name__} returns {type(logits).__name__}, and no tensor of logits; nearest: {near}"
            )
        return logits

    def _note(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._calls.append(name)
            self._outputs.append(output)
            self._seen[name] = next(iter(args), None), output
            given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if given is not None and isinstance(output, Tensor):
                self._fronts[name] = InputModule(name, output.shape[-1], output.ndim > given.ndim)

        return note

    def _spread(self, model: nn.Module, owners: Mapping[str, nn.Module], front: Sequence[str]) -> Vocabulary:
        """The embedding and the head, if their rows can lie on different ranks."""
        why, head = f"head {SPREAD!r}: the model ", self.back[-1] if self.back else ""
        near = "; nearest: head 'last'"
        given = {name: self._seen[name] for name in front}
        embedding = next((name for name, (ids, _) in given.items() if _same(ids, self.tokens)), "")
        embeds, gives = owners.get(embedding), owners.get(head)
        if not isinstance(embeds, nn.Embedding) or not _same(
            given[embedding][1], nn.functional.embedding(self.tokens, embeds.weight)
        ):
            raise ConfigError(f"{why}does more to tokens than to look them up in an nn.Embedding{near}")
        if embeds.max_norm is not None or embeds.scale_grad_by_freq or embeds.sparse:
            raise ConfigError(f"{why}has an embedding with max_norm, scale_grad_by_freq or sparse{near}")
        if not isinstance(gives, nn.Linear) or gives.bias is not None or not _same(self._seen[head][1], self.logits):
            raise ConfigError(f"{why}does not give the output of an nn.Linear without bias as its logits{near}")
        if gives.out_features != embeds.num_embeddings or not (
            embeds.weight.requires_grad and gives.weight.requires_grad
        ):
            raise ConfigError(f"{why}has not as many trained rows in head and embedding{near}")
        targets = torch.where(torch.arange(len(PROBE), device=self.tokens.device) % 3 == 0, IGNORED, self.tokens)
        with torch.no_grad(), evaluating(model):
            loss = model(self.tokens, targets)
        expected = nn.functional.cross_entropy(self.logits.float().flatten(0, 1), targets.flatten())
        if loss.ndim or not torch.isclose(loss.float(), expected, rtol=1e-4):
            raise ConfigError(f"{why}has another loss than the mean cross-entropy{near}")
        return Vocabulary(self._fronts[embedding], head, embeds.num_embeddings, embeds.padding_idx)

    def _sides(self, owners: Mapping[str, nn.Module], name: str, num_layers: int) -> tuple[tuple[str, ...], ...]:
        expected = [f"{name}.{index}" for index in range(num_layers)]
        if [call for call in self._calls if call in expected] != expected:
            raise ConfigError(f"the layers of {name} don't run once each, one after the other: they can't be cut")
        start, end = self._calls.index(expected[0]), self._calls.index(expected[-1])
        front = dict.fromkeys(call for call in self._calls[:start] if call in owners)
        back = dict.fromkeys(call for call in self._calls[end:] if call in owners)
        for owner in owners:
            if (owner in front) + (owner in back) != 1 or owner in self._calls[start:end]:
                raise ConfigError(f"{owner} has weights that are used among the layers, or not by itself: can't be cut")
        self._outputs = [out for call, out in zip(self._calls, self._outputs, strict=True) if call in expected]
        return tuple(front), tuple(back)


def _same(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and torch.equal(one, other)


def _hidden_of(outputs: Sequence[Any]) -> tuple[Tensor, int]:
    """The first layer's hidden state, and the number of values that a layer returns."""
    kinds = {len(output) if isinstance(output, tuple) else 0 for output in outputs}
    hidden = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    if len(kinds) > 1 or not isinstance(hidden, Tensor) or hidden.ndim != 3:
        raise ConfigError("the layers return something else than one hidden state [batch, seq, features] each")
    return hidden, kinds.pop()


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
