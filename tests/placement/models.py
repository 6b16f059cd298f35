"""Models with branches for placements, and what one process makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


class Inception(nn.Module):
    """Branches of unlike length on one input, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        self.long = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.cat([self.short(x) * self.scale, self.middle(x), self.long(x)], -1)
        a, b, c = parts.chunk(3, -1)
        return x + a * b + c


class Branched(nn.Module):
    """Inception-like blocks; returns the loss, and what it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inception() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, targets: Tensor, factor: float = 2.0) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x.view(x.shape[0], -1))) * factor
        return {"loss": F.cross_entropy(logits, targets), "logits": logits}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).view(x.size(0), x.size(1), 2, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)


class Transformer(nn.Module):
    """Two layers with attention and MLP side by side; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        for attention, mlp, norm in zip(self.attention, self.mlp, self.norms, strict=True):
            h = norm(x)
            x = x + attention(h) + mlp(h)
        logits = x @ self.embedding.weight.t()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class Spectral(nn.Module):
    """Two branches on a complex spectrum, which is conjugated without a copy, and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.real, self.imag = nn.Linear(WIDTH, WIDTH), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
        spectrum = torch.fft.rfft(self.first(x)).conj()
        logits = self.real(spectrum.real) + self.imag(spectrum.imag)
        return {"loss": F.cross_entropy(logits, targets), "spectrum": spectrum}


class Ignoring(nn.Module):
    """A leaf that takes two tensors, and uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x)


class Spare(nn.Module):
    """Has outputs that the loss does not use, and a tensor that a leaf does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.fed, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.ignoring = Ignoring()
        self.spare = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.head(self.ignoring(h, self.fed(h))), self.spare(h.tanh())


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = {"branched": Branched, "transformer": Transformer, "spectral": Spectral, "spare": Spare}[name]().to(
            dtype
        )
    return model


def batch(name: str, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The inputs of a call."""
    generator = torch.Generator().manual_seed(seed)
    if name != "transformer":
        x = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        return x, torch.randint(0, 5, (6,), generator=generator)
    tokens = torch.randint(0, 11, (2, 5), generator=generator)
    return tokens, tokens.roll(-1, 1)


def alone(name: str, steps: int) -> dict[str, Any]:
    """What one process gives: by step outputs and gradients, and in the end weights and buffers."""
    model = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: dict[str, Any] = {"steps": []}
    for step in range(steps):
        output = model(*batch(name, step))
        output["loss"].backward()
        grads = {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
        told["steps"].append(({key: value.detach() for key, value in output.items()}, dict(grads)))
        optimizer.step()
        optimizer.zero_grad()
    return told | {"state": model.state_dict()}
