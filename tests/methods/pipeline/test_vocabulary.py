"""Both algorithms of vocabulary parallelism against the cross-entropy of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.methods.pipeline.vocabulary import Own, agree, embedded_gradient, gradients, padded_rows, scores

TOKENS, FEATURES = 24, 16


def problem(vocab_size: int, num_ranks: int, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X, W of all ranks, targets and the gradients of the tokens' losses; one token counts for nothing."""
    generator = torch.Generator().manual_seed(vocab_size)
    x = scale * torch.randn(TOKENS, FEATURES, dtype=torch.float64, generator=generator)
    weight = torch.randn(padded_rows(vocab_size, num_ranks), FEATURES, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, vocab_size, (TOKENS,), generator=generator)
    by_token = torch.rand(TOKENS, dtype=torch.float64, generator=generator)
    by_token[3] = 0.0
    return x, weight, targets, by_token


def dense(x: Tensor, weight: Tensor, targets: Tensor, by_token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = F.cross_entropy(x @ weight.T, targets, reduction="none")
    (loss * by_token).sum().backward()
    assert x.grad is not None and weight.grad is not None
    return loss.detach(), x.grad, weight.grad


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize(
    ("vocab_size", "num_ranks", "scale"),
    # Of 10 rows over 4 ranks the last holds none that is real; of 3 the last two.
    [(64, 4, 1.0), (64, 1, 1.0), (61, 4, 1.0), (10, 4, 1.0), (3, 4, 1.0), (64, 4, 1e4)],
)
def test_loss_and_gradients_are_those_of_one_process(
    barriers: int, vocab_size: int, num_ranks: int, scale: float
) -> None:
    x, weight, targets, by_token = problem(vocab_size, num_ranks, scale)
    if scale > 1:
        # A rank of which no token is a target.
        targets = targets % 48
    loss, by_x, by_weight = dense(x, weight[:vocab_size], targets, by_token)
    owns = [Own.of(rank, num_ranks, vocab_size) for rank in range(num_ranks)]
    parts = [own.part(weight[:vocab_size]) for own in owns]
    found = [scores(x, part, targets, own, barriers=barriers) for own, part in zip(owns, parts, strict=True)]
    told = torch.stack([each.told for each in found])
    agreed = [agree(each, told, rank, by_token) for rank, each in enumerate(found)]
    size = max(1.0, loss.abs().max().item())
    assert all((both.loss - loss).abs().max() <= 1e-12 * size for both in agreed)
    given = [
        gradients(x, part, targets, own, each, both, by_token, barriers=barriers)
        for own, part, each, both in zip(owns, parts, found, agreed, strict=True)
    ]
    of_x = [both.part for both in agreed] if barriers == 1 else [part for _, part in given]
    got = sum(part for part in of_x if part is not None)
    assert isinstance(got, Tensor) and (got - by_x).abs().max() <= 1e-12
    ours = torch.cat([part for part, _ in given])
    assert (ours[:vocab_size] - by_weight).abs().max() <= 1e-12 * scale
    assert not ours[vocab_size:].any() and torch.isfinite(ours).all()
    # No rank holds more than its part of the logits.
    assert all(each.probabilities.shape == (TOKENS, padded_rows(vocab_size, num_ranks) // num_ranks) for each in found)


def test_padding_is_to_two_rows_a_rank() -> None:
    assert padded_rows(256_008, 24) == 256_032 and padded_rows(64, 4) == 64


def test_the_embedding_over_ranks_is_the_embedding() -> None:
    weight = torch.randn(16, FEATURES, dtype=torch.float64, requires_grad=True)
    tokens, given = torch.tensor([3, 3, 15, 0, 7, 3]), torch.randn(6, FEATURES, dtype=torch.float64)
    whole = F.embedding(tokens, weight)
    whole.backward(given)
    assert weight.grad is not None
    for own in (Own.of(rank, 4, 16) for rank in range(4)):
        here = own.local(tokens)[1]
        assert torch.equal(own.part(weight.detach())[tokens[here] - own.first], whole.detach()[here])
        found = embedded_gradient(given[here], tokens[here], own)
        assert torch.equal(found, weight.grad[own.first : own.first + own.size])
