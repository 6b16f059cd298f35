"""A vocabulary spread over a pipeline: each rank has rows of embedding and head, and works on every micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Piece, Share
from thinwire.errors import ConfigError
from thinwire.losses.blocks import check_ids
from thinwire.methods.pipeline import Cut
from thinwire.methods.pipeline.trial import IGNORED
from thinwire.methods.pipeline.vocabulary import (
    NUM_SCORES,
    Own,
    Scores,
    SoftmaxShare,
    agree,
    embedded_gradient,
    gradients,
    kept_elements,
    logits_of,
    scores,
    wide,
)
from thinwire.optim.sums import SummingOptimizer
from thinwire.state.elementwise import needs_whole_tensors

TokenBatch = tuple[Tensor, Tensor | None]


class VocabularyRows(nn.Module):
    """A rank's rows of an embedding or a head, in place of the whole."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


@dataclass(frozen=True)
class SpreadRows:
    """Parameters of which this rank has the rows `own`, and their places in a checkpoint, which holds no padding.

    shapes: of the whole parameters, by name.
    """

    own: Own
    shapes: dict[str, torch.Size]

    def piece_of_whole(self, key: str, piece: Piece, number: int = 0, count: int = 1) -> Piece:
        """See TensorAxis.piece_of_whole. The padding in the piece becomes zero."""
        name = next((name for name in self.shapes if key.endswith(f"/{name}")), None)
        # A rank's own state covers only its part.
        if name is None or key.startswith("own/"):
            return piece
        shared, width = piece.share(number, count), self.shapes[name][1:].numel()
        real = max(0, self.own.num_real * width - shared.offset)
        shared.values[real:].zero_()
        offset, numel = shared.offset + self.own.first * width, self.shapes[name].numel()
        return replace(shared, is_copy=False, values=shared.values[:real], offset=min(offset, numel), numel=numel)

    def share_of_whole(self, share: Share) -> Share | None:
        """See TensorAxis.share_of_whole; None if the piece is only padding."""
        if share.name not in self.shapes:
            return share
        whole, width = self.shapes[share.name], self.shapes[share.name][1:].numel()
        length = min(share.length, self.own.num_real * width - share.offset)
        offset = share.offset + self.own.first * width
        return replace(share, offset=offset, length=length, numel=whole.numel()) if length > 0 else None

    def part(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of whole tensors."""
        return {name: self.own.part(value) if name in self.shapes else value for name, value in values.items()}

    def part_of_flat(self, name: str, values: Tensor) -> Tensor:
        """This rank's part of a whole parameter's values, both flat."""
        return self.own.part(values.view(self.shapes[name])).flatten() if name in self.shapes else values


@torch.no_grad()
def spread_rows(
    made: Cut, optimizer: torch.optim.Optimizer, own: Own
) -> tuple[VocabularyRows, VocabularyRows, SpreadRows]:
    """Leave in model and optimizer only this rank's rows of embedding and head; one module if they are tied.

    Raises ConfigError for an optimizer that needs these parameters as whole tensors.
    """
    assert made.vocabulary is not None
    places = made.vocabulary.embedding.name, made.vocabulary.head
    whole = [made.model.get_submodule(place).get_parameter("weight") for place in places]
    needs_all = needs_whole_tensors(optimizer)
    across = optimizer.matrices if isinstance(optimizer, SummingOptimizer) else whole if needs_all else []
    if set(map(id, across)) & set(map(id, whole)):
        raise ConfigError(
            f"head 'spread': {type(optimizer).__name__} needs embedding and head as whole matrices; nearest: head "
            "'last', or an elementwise optimizer, such as AdamW"
        )
    rows = {id(param): VocabularyRows(nn.Parameter(own.part(param))) for param in whole}
    shapes = {f"{place}.weight": param.shape for place, param in zip(places, whole, strict=True)}
    if len(rows) == 1:
        # Its name is that of the place that comes first in the model.
        name = next(name for name, param in made.model.named_parameters() if param is whole[0])
        shapes = {name: whole[0].shape}
    for place, param in zip(places, whole, strict=True):
        made.model.set_submodule(place, rows[id(param)])
    for group in optimizer.param_groups:
        group["params"] = [rows[id(each)].weight if id(each) in rows else each for each in group["params"]]
    for param in whole:
        optimizer.state.pop(param, None)
    embedding, head = (rows[id(param)] for param in whole)
    return embedding, head, SpreadRows(own, shapes)


class SpreadVocabulary:
    """This rank's work on embedding and head. A micro-batch is (tokens, targets or None), the same on all ranks.

    rows: see `spread_rows`. padding: a token whose embedding is not trained. features: width of a hidden state.
    """

    def __init__(
        self, embedding: VocabularyRows, head: VocabularyRows, rows: SpreadRows, *, rank: int, num_ranks: int,
        features: int, padding: int | None,
    ) -> None:  # fmt: skip
        self.embedding, self.head, self.rows = embedding, head, rows
        self.rank, self.num_ranks, self.features, self.padding = rank, num_ranks, features, padding
        self._owns = [Own.of(each, num_ranks, rows.own.valid) for each in range(num_ranks)]
        # What a training loop calls a model through, see StageChunk.
        self.loss: Callable[[Any, Any], Tensor] = lambda module, batch: module(*batch)

    def check(self, micro_batch: TokenBatch) -> None:
        """Raise ConfigError for a token or target that the vocabulary does not have: no rank would look it up."""
        tokens, targets = micro_batch
        size = self.rows.own.valid
        counted = None if targets is None else targets[targets != IGNORED]
        for name, ids in (("token", tokens), ("target", counted)):
            if ids is not None:
                check_ids(ids, size, name)

    def count(self, rank: int, micro_batch: TokenBatch) -> int:
        """Number of tokens of a micro-batch whose rows a rank has; if tokens are on the meta device, an equal share."""
        if micro_batch[0].is_meta:
            return micro_batch[0].numel() // self.num_ranks
        return int(self._here(rank, micro_batch).sum())

    def num_elements(self, kind: str, rank: int, micro_batch: TokenBatch) -> int:
        """Number of elements of a message, see Shared. rank: the rank whose rows it is about."""
        if kind in ("rows", "gradient"):
            return self.count(rank, micro_batch) * self.features
        has_loss = micro_batch[1] is not None
        return micro_batch[0].numel() * (NUM_SCORES * has_loss if kind == "scores" else self.features)

    def kept_bytes(self, micro_batch: TokenBatch, barriers: int) -> float:
        """The most bytes kept between S and T, see `kept_elements`."""
        num = kept_elements(micro_batch[0].numel(), self.rows.own.size, self.features, barriers)
        return float(wide(self.head.weight.dtype).itemsize * num)

    def embed(self, micro_batch: TokenBatch) -> Tensor:
        """[n, h]: the embeddings of the tokens whose rows are here, in the tokens' order."""
        tokens = micro_batch[0].flatten()
        found = tokens[self.rows.own.local(tokens)[1]] - self.rows.own.first
        return self.embedding.weight.detach()[found]

    def joined(self, micro_batch: TokenBatch, of_ranks: Sequence[Tensor]) -> Tensor:
        """[batch, seq, h]: the embeddings of all tokens, from every rank's `embed`."""
        tokens = micro_batch[0]
        whole = of_ranks[0].new_empty(tokens.numel(), self.features)
        for rank, rows in enumerate(of_ranks):
            whole[self._here(rank, micro_batch)] = rows.view(-1, self.features)
        return whole.view(*tokens.shape, self.features)

    def parted(self, micro_batch: TokenBatch, gradient: Tensor) -> list[Tensor]:
        """The inverse of `joined`: the gradient [n, h] for each rank."""
        flat = gradient.reshape(-1, self.features)
        return [flat[self._here(rank, micro_batch)] for rank in range(self.num_ranks)]

    def scatter(self, micro_batch: TokenBatch, gradient: Tensor) -> None:
        """Add the gradient [n, h] of the result of `embed` to the rows' gradient."""
        own, tokens = self.rows.own, micro_batch[0].flatten()
        tokens = tokens[own.local(tokens)[1]]
        gradient = gradient.view(-1, self.features)
        if self.padding is not None:
            gradient, tokens = gradient[tokens != self.padding], tokens[tokens != self.padding]
        self.add(self.embedding, embedded_gradient(gradient, tokens, own))

    def logits(self, micro_batch: TokenBatch, hidden: Tensor) -> Tensor:
        """[batch, seq, V/p], in the dtype of the hidden state."""
        x, weight = self.factors(hidden)
        found = logits_of(x, weight, self.rows.own)
        return found.view(*micro_batch[0].shape, self.rows.own.size).to(hidden.dtype)

    def factors(self, hidden: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """X [N, h] and the head's rows, in the dtype of their product; by default autocast's."""
        kind = hidden.device.type
        own = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        dtype = own if dtype is None else dtype
        return hidden.reshape(-1, self.features).to(dtype), self.head.weight.detach().to(dtype)

    def add(self, rows: VocabularyRows, gradient: Tensor) -> None:
        """Add the gradient to the rows' gradient, in place."""
        gradient = gradient.to(rows.weight.dtype)
        rows.weight.grad = gradient if rows.weight.grad is None else rows.weight.grad.add_(gradient)

    def _here(self, rank: int, micro_batch: TokenBatch) -> Tensor:
        """bool [N]: the tokens whose rows a rank has."""
        return self._owns[rank].local(micro_batch[0].flatten())[1]


class HeadPass:
    """A micro-batch at the head of one rank, from action S to action T.

    share: weight of its mean loss in the step's loss.
    """

    def __init__(self, vocabulary: SpreadVocabulary, micro_batch: TokenBatch, share: float, barriers: int) -> None:
        assert micro_batch[1] is not None
        self.vocabulary, self.micro_batch, self.barriers = vocabulary, micro_batch, barriers
        self.targets = micro_batch[1].flatten()
        counts = self.targets != IGNORED
        self.token_gradients = counts.double() * (share / max(1, int(counts.sum())))
        self._found: Scores | None = None
        self._agreed: SoftmaxShare | None = None

    def score(self, hidden: Tensor) -> Tensor:
        """Action S: the scores [3, N] that are sent to other ranks."""
        vocabulary = self.vocabulary

        def module(*batch: Any) -> Tensor:
            self.x, weight = vocabulary.factors(hidden)
            barriers = self.barriers if torch.is_grad_enabled() else 2
            with torch.autocast(hidden.device.type, enabled=False), torch.no_grad():
                self._found = scores(self.x, weight, self.targets, vocabulary.rows.own, barriers=barriers)
            return self._found.told

        vocabulary.loss(module, self.micro_batch)
        assert self._found is not None
        return self._found.told

    @torch.no_grad()
    def agree(self, told: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Action C: the micro-batch's part of the loss.

        With one barrier also this rank's part of the hidden state's gradient.
        """
        assert self._found is not None
        stacked = torch.stack([each.view(NUM_SCORES, -1) for each in told])
        by_token = self.token_gradients.to(stacked.dtype)
        agreed = agree(self._found, stacked, self.vocabulary.rank, by_token)
        # What C has used or given is not kept until T.
        self._found, self._agreed = replace(self._found, expected=None, aimed=None), replace(agreed, part=None)
        return (agreed.loss * by_token).sum(), self._shaped(agreed.part)

    @torch.no_grad()
    def train(self) -> Tensor | None:
        """Action T: add the gradient of the head's rows.

        With two barriers, return the part of the hidden state's gradient.
        """
        assert self._found is not None and self._agreed is not None
        vocabulary, by_token = self.vocabulary, self.token_gradients.to(self._agreed.loss.dtype)
        _, weight = vocabulary.factors(self.x, self.x.dtype)
        by_weight, part = gradients(
            self.x, weight, self.targets, vocabulary.rows.own, self._found, self._agreed, by_token,
            barriers=self.barriers,
        )  # fmt: skip
        vocabulary.add(vocabulary.head, by_weight)
        return self._shaped(part)

    def _shaped(self, part: Tensor | None) -> Tensor | None:
        return None if part is None else part.view(*self.micro_batch[0].shape, self.vocabulary.features)


def whole_logits(of_ranks: Tensor, size: int) -> Tensor:
    """Logits [..., V] from [p, ..., V/p], without padding."""
    return of_ranks.movedim(0, -2).flatten(-2)[..., :size].contiguous()
