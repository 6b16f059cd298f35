"""The record of a training by one-byte gradients: the bytes of every step, from which it can be repeated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.methods import slope_code as byte
from thinwire.methods.directions import Directions
from thinwire.state.replicas import ReplicaError, check_layout, digest, fitting_parameters, shapes_digest


@dataclass(frozen=True)
class Entry:
    """One step: codes uint8 [ranks, n], the factor of the sum over samples, each group's learning rate."""

    codes: Tensor
    factor: float
    lrs: tuple[float, ...]


class SlopeLog:
    """The steps that all ranks took, from `first_step` on; P n + 8 + 8 groups bytes per step.

    Step t gives the optimizer the gradient g = factor sum_{r,k} p_rk z_rk, where p = min(max(decoded, -cap), cap) and z
    comes from (seed, t, r, k). A run and its repetition use the same code, so equal weights stay equal, bit for bit, on
    any number of ranks. A sealed log holds a 16-byte hash of the weights after one of its steps, and a repetition
    compares its own weights with it.
    """

    def __init__(self, seed: int, cap: float, parameters: str, first_step: int = 0) -> None:
        self.seed, self.cap, self.parameters, self.first_step = seed, cap, parameters, first_step
        self.entries: list[Entry] = []
        self.sealed_step, self.seal_digest = first_step, ""

    @property
    def end(self) -> int:
        """Number of the next step."""
        return self.first_step + len(self.entries)

    @property
    def layout(self) -> dict[str, Any]:
        """Properties that a run and its log must share."""
        return {"parameters": self.parameters, "seed": self.seed, "cap": self.cap}

    def slopes(self, codes: Tensor) -> Tensor:
        """Slopes of the bytes, fp64: decoded, then limited to the cap; 0 for a sample that is left out."""
        return byte.decode(codes).clamp(-self.cap, self.cap)

    def seal(self, weights: Iterable[Tensor]) -> None:
        """Record a hash of the trained weights after the last step."""
        self.sealed_step, self.seal_digest = self.end, _hex(weights)

    def take(self, step: int, directions: Directions, optimizer: torch.optim.Optimizer) -> None:
        """Take a step from the log. A step in which every sample was left out does nothing."""
        entry = self.entries[step - self.first_step]
        if entry.factor == 0.0:
            return
        for group, lr in zip(optimizer.param_groups, entry.lrs, strict=True):
            group["lr"] = lr
        slopes = self.slopes(entry.codes)
        samples = [(int(rank), int(k)) for rank, k in slopes.nonzero()]
        with directions.gradient(step, samples, (slopes[slopes != 0] * entry.factor).tolist()):
            optimizer.step()

    def replay(self, model: nn.Module, optimizer: torch.optim.Optimizer, after: int | None = None) -> None:
        """Bring a model at step `after` to the end of the log, without data and without other ranks.

        after: by default the beginning of the log. The optimizer must be that of the run, in its state after that step.
        Raises ConfigError for another model or optimizer, and for a step outside of the log; ReplicaError if the
        weights differ from the run's at the sealed step.
        """
        after = self.first_step if after is None else after
        trained = fitting_parameters(model, optimizer)
        check_layout({"parameters": shapes_digest(trained)}, {"parameters": self.parameters})
        if not self.first_step <= after <= self.end:
            raise ConfigError(f"after {after}: the log holds the steps from {self.first_step} to {self.end}")
        self.repeat(Directions(trained, self.seed), optimizer, after)

    @torch.no_grad()
    def repeat(self, directions: Directions, optimizer: torch.optim.Optimizer, after: int) -> None:
        """Take the steps after `after`; see replay."""
        groups = {len(entry.lrs) for entry in self.entries}
        if groups - {len(optimizer.param_groups)}:
            raise ConfigError(f"the optimizer has {len(optimizer.param_groups)} groups; the run's had {max(groups)}")
        for step in range(after, self.end):
            self.take(step, directions, optimizer)
            if self.seal_digest and step + 1 == self.sealed_step and _hex(directions.trained) != self.seal_digest:
                raise ReplicaError(
                    f"after step {step + 1} of the log the weights are not those of the run: it began from other "
                    "weights, or its machine rounds differently"
                )

    def state_dict(self) -> dict[str, Any]:
        """The log as a few tensors."""
        return {
            **self.layout,
            "first_step": self.first_step,
            "sealed_step": self.sealed_step,
            "seal_digest": self.seal_digest,
            "codes": torch.cat([torch.empty(0, dtype=torch.uint8), *(e.codes.flatten() for e in self.entries)]),
            "shapes": torch.tensor([tuple(entry.codes.shape) for entry in self.entries]).view(-1, 2),
            "factors": torch.tensor([entry.factor for entry in self.entries], dtype=torch.float64),
            "lrs": torch.tensor([entry.lrs for entry in self.entries], dtype=torch.float64),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> SlopeLog:
        """Restore a log from its state_dict."""
        log = cls(state["seed"], state["cap"], state["parameters"], state["first_step"])
        shapes = [(ranks, samples) for ranks, samples in state["shapes"].long().tolist()]
        codes = state["codes"].split([ranks * samples for ranks, samples in shapes])
        lrs = state["lrs"].tolist()
        log.entries = [
            Entry(part.view(shape), factor, tuple(rates))
            for part, shape, factor, rates in zip(codes, shapes, state["factors"].tolist(), lrs, strict=True)
        ]
        log.sealed_step, log.seal_digest = state["sealed_step"], state["seal_digest"]
        return log

    def save(self, file: str | Path | IO[bytes]) -> None:
        """Write the log to a file. The old content stays until the new one is complete."""
        if not isinstance(file, str | Path):
            torch.save(self.state_dict(), file)
            return
        temporary = Path(f"{file}.tmp")
        torch.save(self.state_dict(), temporary)
        temporary.replace(file)

    @classmethod
    def load(cls, file: str | Path | IO[bytes]) -> SlopeLog:
        """Read a file written by `save`. Raises ConfigError for any other file."""
        try:
            return cls.from_state_dict(torch.load(file, weights_only=True))
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, UnpicklingError) as error:
            raise ConfigError(f"{file} is not a readable log of one-byte gradients: {error}") from None


def _hex(weights: Iterable[Tensor]) -> str:
    return bytes(digest(weights).tolist()).hex()
