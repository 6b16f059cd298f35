"""A small model in fp64 in as many chunks as wished, and its gradients in one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


class Stage(nn.Module):
    """Some layers; the first chunk embeds, the last has the loss. A micro-batch is (tokens [n], targets [n])."""

    def __init__(self, chunk: int, num_chunks: int, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(chunk)
        self.embedding = nn.Embedding(11, WIDTH, dtype=torch.float64) if chunk == 0 else None
        self.layer = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64), nn.Tanh(), nn.Dropout(dropout),
            nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64), nn.LayerNorm(WIDTH, dtype=torch.float64),
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, 11, dtype=torch.float64) if chunk == num_chunks - 1 else None
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3)

    def forward(self, hidden: Tensor | None, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = micro_batch
        if self.embedding is not None:
            hidden = self.embedding(tokens)
        assert hidden is not None
        hidden = hidden + self.layer(hidden)
        return hidden if self.head is None else F.cross_entropy(self.head(hidden), targets)


def micro_batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randint(0, 11, (size,), generator=generator), torch.randint(0, 11, (size,), generator=generator))
        for size in sizes
    ]


def shape(chunk: int, micro_batch: tuple[Tensor, Tensor]) -> tuple[int, int]:
    return len(micro_batch[0]), WIDTH


def alone(paths: list[tuple[int, ...]], sizes: list[int], shares: list[float]) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients by "chunk.name" of one process."""
    num_chunks = max(map(max, paths)) + 1
    stages = nn.ModuleList(Stage(chunk, num_chunks) for chunk in range(num_chunks))
    total = torch.zeros((), dtype=torch.float64)
    for path, micro_batch, share in zip(paths, micro_batches(sizes), shares, strict=True):
        hidden = None
        for chunk in path:
            hidden = stages[chunk](hidden, micro_batch)
        assert hidden is not None
        total = total + share * hidden
    total.backward()
    return total.item(), {name: param.grad for name, param in stages.named_parameters() if param.grad is not None}
