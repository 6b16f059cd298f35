"""Compares an exported model with the run's on the same held-out text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.errors import ThinwireError

# Tokens whose fp64 logits are in memory at a time.
ROWS = 64


class UnfaithfulError(ThinwireError):
    """The exported model or tokenizer differs from the run's; the folder is deleted (exit code 2)."""

    exit_code = 2


@dataclass(frozen=True)
class Fidelity:
    """Agreement of an export with its run.

    kl: mean over tokens of KL(run || export) in nats. agreement: share of tokens with the same prediction.
    """

    kl: float
    agreement: float
    num_tokens: int

    def __str__(self) -> str:
        return f"KL {self.kl:.3g} nats per token, greedy agreement {100 * self.agreement:.2f} %"

    def check(self, max_kl: float, min_agreement: float) -> None:
        """Raise UnfaithfulError unless both values are within their limits. NaN is not within any limit."""
        if not (self.kl <= max_kl and self.agreement >= min_agreement):
            raise UnfaithfulError(
                f"the exported model differs from the run: {self} over {self.num_tokens:,} tokens; the limits are "
                f"--max-kl {max_kl:g} and --min-agreement {min_agreement:g}; the folder was deleted"
            )


class KeptLogits:
    """What a model has said of batches, in files, so that it need not be in memory beside another one.

    Call it once for each batch, in order, and so as often as stated. The model's weights are given up.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, batches: Iterable[Tensor], folder: Path, times: int = 1) -> None:
        """folder: the files lie in it, each until it is read for the last time. times: number of rounds of calls."""
        self._files: list[Path] = []
        for number, tokens in enumerate(batches):
            self._files.append(folder / f"logits-{number}.pt")
            torch.save(model(tokens), self._files[-1])
        model.to("meta")
        self._coming = iter(self._files * times)
        self._left = len(self._files) * (times - 1)

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits of the next batch, [batch, seq, vocab]."""
        file = next(self._coming)
        found: Tensor = torch.load(file, weights_only=True)
        if not self._left:
            file.unlink()
        self._left = max(0, self._left - 1)
        return found


@torch.no_grad()
def compare(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], batches: Iterable[Tensor]
) -> Fidelity:
    """Compare both models on batches of tokens, int64 [batch, seq].

    The divergence is the sum over the vocabulary of p (log p - log q), with p of `ours`, in fp64.

    ours, theirs: give logits [batch, seq, vocab] of tokens: a model, or what was kept of one.
    """
    divergence, num_same, num_tokens = 0.0, 0, 0
    for tokens in batches:
        found = (model(tokens).flatten(0, 1).split(ROWS) for model in (ours, theirs))
        for p, q in zip(*found, strict=True):
            p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
            divergence += float((p.exp() * (p - q)).sum())
            num_same += int((p.argmax(-1) == q.argmax(-1)).sum())
        num_tokens += tokens.numel()
    return Fidelity(divergence / num_tokens, num_same / num_tokens, num_tokens)
