"""A small model under any strategy, in a world of any size, with the same tokens in every step; saved and loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from thinwire._compat import default_store
from thinwire.checkpoint import Disk, Keep, Saver, Source
from thinwire.compose import apply
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.methods.data.fsdp import FSDP
from thinwire.methods.data.zero import Zero

SEQUENCES = 24
STRATEGIES: dict[str, tuple[Any, str]] = {
    "zero": (Zero(), "adamw"),
    "sdp4bit": (thinwire.SDP4Bit(), "adamw"),
    "sdp4bit-loco": (thinwire.SDP4Bit(loco=True), "adamw"),
    "zero-compressed": (thinwire.ZeroCompressed(), "adamw"),
    "zero-estimates": (thinwire.ZeroCompressed("topk10%", feedback="estimates", fresh=0.5), "adamw"),
    "ddp": (thinwire.DDP(), "adamw"),
    "powersgd": (thinwire.PowerSGD(start_step=0, rank=2), "adamw"),
    "two-way": (thinwire.TwoWay(min_bytes=0), "adamw"),
    "ef-topk": (thinwire.EFTopK("topk10%"), "adamw"),
    "dgc": (thinwire.DGC(density=0.2, clip=0.0, warmup=()), "dgc-sgd"),
    "onebit-adam": (thinwire.OneBitAdam(freeze=2, clip=0.0), "onebit-adam"),
    "fsdp": (FSDP(), "adamw"),
    "zeropp": (thinwire.ZeroPP(loco=True), "adamw"),
    "frontier": (thinwire.Frontier(), "adamw"),
    "zero-dion": (Zero(), "dion"),
    "fsdp-dion": (FSDP(), "dion"),
    "ddp-dion": (thinwire.DDP(), "dion"),
}


class Net(nn.Module):
    """1,024 elements, which no 3 ranks share equally; 5, fewer than 8 ranks; a frozen part, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(32, 32)
            self.five = nn.Parameter(torch.ones(5))
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
            self.fixed = nn.Linear(32, 32, bias=False).requires_grad_(False)
            self.register_buffer("seen", torch.full((3,), float(seed)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.five.mean() + 0.1 * self.fixed(self.embed(tokens))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy((x @ self.embed.weight.T)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int) -> Tensor:
    """The sequences of a step, whatever the world."""
    return torch.randint(0, 32, (SEQUENCES, 9), generator=torch.Generator().manual_seed(step))


@dataclass
class Replica:
    """One rank of a training."""

    model: nn.Module
    wrapped: nn.Module
    optimizer: ParallelOptimizer
    rank: int
    world_size: int

    @classmethod
    def make(
        cls, name: str, rank: int, world_size: int, seed: int, local_size: int,
        residency: thinwire.Residency | None = None,
    ) -> Replica:  # fmt: skip
        strategy, kind = STRATEGIES[name]
        model = Net(seed)
        params = [param for param in model.parameters() if param.requires_grad]
        make: Any = {
            "adamw": torch.optim.AdamW,
            "dgc-sgd": thinwire.DGCSGD,
            "onebit-adam": thinwire.OneBitAdamW,
            "dion": partial(thinwire.DionOptimizer, rank=4, codec="int8/32"),
        }[kind]
        optimizer = make([{"params": params[:1]}, {"params": params[1:]}], lr=3e-3)
        options: Any = {"seed": 3, "timeout_s": 300, "checked": False, "overlap": True}
        if residency is not None:
            options["residency"] = residency
        wrapped, parallel = apply(strategy, model, optimizer, local_size=local_size, **options)
        return cls(model, wrapped, parallel, rank, world_size)

    def step(self, number: int) -> float:
        """The mean loss of step `number` over all ranks."""
        share = SEQUENCES // self.world_size
        loss = self.wrapped(batch(number)[self.rank * share : (self.rank + 1) * share])
        self.optimizer.note_loss(float(loss.detach()))
        loss.backward()
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.optimizer.mean_loss

    def gather(self, number: int) -> list[int]:
        comm = self.optimizer.comm
        return [int(n) for n in comm.wait(comm.all_gather_exact(torch.tensor([number])))]

    def save(self, folder: Path, step: int) -> None:
        saver = Saver(folder, Disk.find(folder, self.rank, self.gather), default_store(), Keep(), 60.0)
        saver.save(step, self.optimizer.snapshot(), loss=None, about={})
        saver.close()
        assert not (problems := saver.problems()), problems

    def load(self, checkpoint: Path) -> Source:
        source = Source(checkpoint, self.rank)
        self.optimizer.restore(source)
        # Frozen parameters are the trainer's to save.
        assert isinstance(self.model, Net)
        self.model.fixed.load_state_dict(Net(0).fixed.state_dict())
        return source

    def residuals(self) -> dict[str, Tensor]:
        """This rank's residual of each parameter: the mean over ranks is what the weights will still receive."""
        optimizer: Any = self.optimizer
        found: dict[str, Tensor] = {}
        if any(bucket.layout.wire.feedback for bucket in getattr(optimizer, "buckets", [])):
            held = optimizer.memory.state
            # A rank holds nothing of parameters in which it has no slice.
            found |= {name: torch.zeros(shape.numel()) for name, shape in held.place.shapes.items()}
            found |= {name: tensor.reshape(-1) for name, tensor in held.residuals().items()}
        if hasattr(optimizer, "_reducer"):
            residuals = optimizer._reducer.reduction.state.residuals()
            sizes = {name: tensor.numel() for name, tensor in optimizer.trained.items()}
            found |= {name: tensor.reshape(-1)[: sizes[name]].clone() for name, tensor in residuals.items()}
        return found


def atoms(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint that belongs to no rank, whole."""
    from thinwire.checkpoint import Piece
    from thinwire.checkpoint.state import dtype_named

    source = Source(checkpoint, 0)
    found: dict[str, Tensor] = {}
    for name, chunks in source._index.items():
        if not name.startswith("own/"):
            found[name] = torch.empty(chunks[0].numel, dtype=dtype_named(chunks[0].dtype))
            source.read({name: Piece.whole(found[name])})
    return found
