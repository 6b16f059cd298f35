"""The strategies that run on FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from thinwire.codecs import Cast, Codec, Identity
from thinwire.data_parallel.interface import CUTS_TENSORS, ParallelOptimizer
from thinwire.errors import ConfigError, nearest
from thinwire.optim import ELEMENTWISE

WIRES: dict[str, Codec] = {"fp32": Identity(), "bf16": Cast("bf16")}


@dataclass(frozen=True)
class FSDP:
    """torch's fully_shard over thinwire's collectives: one all_gather and one reduce_scatter of everything per step.

    wire: "fp32", or "bf16": weights and gradients travel as bf16, masters and sums stay fp32. Shards are kept whole
    between forward and backward (reshard_after_forward=False), since on a slow link a second gather costs more than the
    memory. Sends 8 (P-1)/P bytes per parameter and step, or 4.

    Raises ConfigError for another wire. Source: Zhao et al., "PyTorch FSDP", VLDB 2023.
    """

    settled_after: ClassVar[int] = 0
    optimizers: ClassVar[tuple[str, ...]] = ELEMENTWISE
    optimizers_reason: ClassVar[str] = CUTS_TENSORS

    wire: str = "fp32"

    def __post_init__(self) -> None:
        if self.wire not in WIRES:
            raise ConfigError(f"wire {self.wire!r} of fsdp: must be fp32 or bf16{nearest(self.wire, WIRES)}")

    @property
    def name(self) -> str:
        """What `--strategy` calls it."""
        return "fsdp" if self.wire == "fp32" else f"fsdp-{self.wire}"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Whose kernels are compiled before the workers start."""
        return (WIRES[self.wire],)

    def apply(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        local_size: int | None,
        seed: int,
        timeout_s: float,
        checked: bool,
        overlap: bool,
    ) -> tuple[nn.Module, ParallelOptimizer]:
        """See TrainingStrategy."""
        # A strategy is a value that is made long before it is applied, often by a process that never trains.
        from thinwire.data_parallel.fsdp.optimizer import wrap_fsdp

        return wrap_fsdp(
            model, optimizer, self, local_size=local_size, timeout_s=timeout_s, checked=checked, overlap=overlap
        )
