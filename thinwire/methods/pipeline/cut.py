"""Cut a causal language model into chunks of layers, whatever its architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from thinwire._compat import flop_counter
from thinwire.errors import ConfigError, nearest
from thinwire.methods.pipeline.balance import balanced
from thinwire.methods.pipeline.chunks import Cut, InputModule, Vocabulary, copy_of
from thinwire.methods.pipeline.trial import IGNORED, check_apart, check_logits, check_training
from thinwire.models.modes import evaluating

PROBE = (3, 1, 4, 1, 5, 2, 6, 0)
SPREAD = "spread"
HEADS = ("last", "first", SPREAD)


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
    tried = replace(made, model=copy_of(model, (), {}))
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
