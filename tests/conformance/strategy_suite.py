"""Every strategy is held to single-process training: add a row here and it inherits all of these tests.

A row says which class of equality holds: an exact strategy follows the single process within 1e-6, a compressed one
stays within a stated relative distance of it after 20 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import thinwire
from thinwire.data_parallel import Strategy, Zero, ZeroBF16


@dataclass(frozen=True)
class Row:
    strategy: Strategy
    # Largest |w - w_single| / |w_single - w_start| over all weights after 20 steps; 0 means: within 1e-6.
    drift: float
    # (world size, ranks per node) to run on.
    grids: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))


ROWS = {
    "zero": Row(Zero(), 0.0),
    "zero-bf16": Row(ZeroBF16(), 0.05),
    "sdp4bit": Row(thinwire.SDP4Bit(), 0.45),
    "sdp4bit-weights": Row(thinwire.SDP4Bit(gradients=False), 0.2),
    "sdp4bit-gradients": Row(thinwire.SDP4Bit(weights=False), 0.45),
    "sdp4bit-3-bit-nearest": Row(thinwire.SDP4Bit(weight_bits=3, inter_bits=6, rounding="nearest"), 0.5, ((4, 2),)),
    "sdp4bit-small-groups": Row(
        thinwire.SDP4Bit(weight_group=64, intra_group=32, inter_group=32, vector_group=32, weight_scale="bf16"),
        0.45,
        ((4, 2),),
    ),
}
STEPS = 20


class Net(nn.Module):
    """Matrices and vectors of awkward sizes, a tied pair, a frozen part and one that is used only in odd steps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(37, 24)
            self.norm = nn.LayerNorm(24)
            self.up = nn.Linear(24, 50)
            self.down = nn.Linear(50, 24, bias=False)
            self.side = nn.Linear(24, 24)
            self.head = nn.Linear(24, 37, bias=False)
            self.head.weight = self.embed.weight
            self.fixed = nn.Linear(24, 24)
            self.fixed.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, use_side: bool) -> torch.Tensor:
        x = self.norm(self.embed(tokens)) + 0.1 * self.fixed(self.embed(tokens))
        x = x + self.down(torch.tanh(self.up(x)))
        if use_side:
            x = x + torch.tanh(self.side(x))
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int) -> torch.Tensor:
    """Eight sequences, the same for every world; ranks take equal parts."""
    return torch.randint(0, 37, (8, 9), generator=torch.Generator().manual_seed(step))


def make_optimizer(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.01, eps=1e-4, initial_accumulator_value=0.1)
    if kind == "amsgrad":
        return torch.optim.Adam(groups, lr=3e-3, eps=1e-4, amsgrad=True)
    # With 1e-8 the first steps are the gradient's sign, which rounding alone can flip.
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-4)


def single_process(kind: str = "adamw", clip: float = 1.0, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The reference: plain PyTorch over the whole batch."""
    model = Net(seed=0)
    optimizer = make_optimizer(model, kind)
    for step in range(steps):
        model(batch(step), step % 2 == 1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def hash_of(model: nn.Module) -> str:
    import hashlib

    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
