"""torch's own PowerSGD hook, to be compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from thinwire.checkpoint import Debt
from thinwire.collectives import Topology
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.methods.data.ddp import DDPMethod
from thinwire.methods.data.reductions import (
    BY_FORMULA,
    FP32_BYTES,
    OPERATION,
    Bucket,
    Reduction,
    Step,
    count_ring,
    ring_bytes,
)
from thinwire.methods.options import check_types
from thinwire.state.portable import Owed


@dataclass(frozen=True)
class TorchPowerSGD(DDPMethod):
    """torch's PowerSGD hook: each gradient matrix travels as two thin ones, and what they lose is added the next time.

    M (n x m) is sent as P = M Q (n x r) and Q = M^T P (m x r), P orthonormal, both summed over ranks; M is replaced by
    P Q^T and M - P Q^T is kept. rank: r. start_step: the first step that is compressed; those before it are plain fp32.
    min_compression: matrices for which (n + m) r is not this much smaller than n m, and vectors, travel in fp32.
    find_unused_parameters: as for ddp. All gradients are one bucket, reduced after backward.

    Raises ConfigError for a rank below 1, a start_step below 2, a min_compression below 1.
    Source: Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1 and 2.
    """

    single_bucket = True

    rank: int = 4
    start_step: int = 10
    min_compression: float = 2.0
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        for option, lowest in (("rank", 1), ("start_step", 2), ("min_compression", 1)):
            value = getattr(self, option)
            if not lowest <= value < float("inf"):
                raise ConfigError(f"{option} {value} of powersgd-torch: must be at least {lowest}; nearest: {lowest}")

    @property
    def name(self) -> str:
        return "powersgd-torch"

    @property
    def settled_after(self) -> int:
        return self.start_step

    def reduction(self, world_size: int, seed: int) -> Reduction:
        return HookMean(self.rank, self.start_step, self.min_compression, seed)


# torch keeps errors by bucket, of which there is one, the same on every world.
BUCKETS = "error feedback of torch's buckets"


class HookMean:
    """torch's powerSGD_hook, which starts one collective from the end of another.

    That is safe as long as nobody else uses the group meanwhile: the communication thread stands still for it.
    """

    def __init__(self, rank: int, start_step: int, min_compression: float, seed: int) -> None:
        self.state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start_step,
            min_compression_rate=min_compression,
            # A column of zeros has no direction: without it, 0/0 where rank is 1 or 2. Higher ranks take a QR.
            orthogonalization_epsilon=1e-8,
            random_seed=seed % (1 << 32),
        )

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        yield from ()
        state = self.state
        state.process_group = link.wire.group
        is_plain, before = state.iter < state.start_powerSGD_iter, state.total_numel_after_compression
        with link.timed("wait_s", OPERATION):
            powerSGD_hook(state, cast(dist.GradBucket, bucket)).wait()
        thin_bytes = FP32_BYTES * (state.total_numel_after_compression - before)
        count_ring(link, bucket.flat.nbytes if is_plain else thin_bytes)

    def sent_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> dict[str, int]:
        return ring_bytes(FP32_BYTES * sum(self._num_sent(shape) for shape in shapes.values()), grid)

    def kept_bytes(self, shapes: Mapping[str, torch.Size], grid: Topology) -> dict[str, int]:
        thin = [num for shape in shapes.values() if (num := self._num_sent(shape)) < shape.numel()]
        whole = sum(shape.numel() for shape in shapes.values())
        return {"error feedback": FP32_BYTES * whole, "factors": FP32_BYTES * sum(thin)}

    def rows(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, str, str]]:
        rank, start = self.state.matrix_approximation_rank, self.state.start_powerSGD_iter
        thin = sum(self._num_sent(shape) < shape.numel() for shape in shapes.values())
        return [
            ("gradients", f"{thin} of {len(shapes)} as factors of rank {rank}, the others in fp32", "by torch's hook"),
            ("steps in fp32", f"the first {start}", "start_step"),
            BY_FORMULA,
        ]

    def forget(self) -> list[str]:
        for held in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            held.clear()
        return ["all"]

    def residuals(self) -> dict[str, Tensor]:
        # Torch keeps them by bucket, of which there is one.
        return {}

    def debts(self, shapes: Mapping[str, torch.Size], grid: Topology, rank: int) -> list[Debt]:
        return [
            Debt(BUCKETS, str(key), f"error/{key}", 0, 0, error.numel(), 1 / grid.world_size)
            for key, error in self.state.error_dict.items()
        ]

    def owe(self, shapes: Mapping[str, torch.Size], grid: Topology, rank: int, owed: Owed) -> None:
        for key, error in self.state.error_dict.items():
            value = owed(BUCKETS, str(key))
            error.zero_() if value is None else error.copy_(value.view_as(error))

    def state_dict(self) -> dict[str, Any]:
        """Keys are buckets; `rng` is numpy's Mersenne Twister, its 624 words and the position."""
        rng = self.state.rng.get_state(legacy=False)["state"]
        return {
            "iter": self.state.iter,
            "error": dict(self.state.error_dict),
            "p": dict(self.state.p_memory_dict),
            "q": dict(self.state.q_memory_dict),
            "rng": torch.from_numpy(rng["key"].astype(np.int64)),
            "rng_position": int(rng["pos"]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.iter = state["iter"]
        self.state.error_dict = {key: value.clone() for key, value in state["error"].items()}
        self.state.p_memory_dict = {key: value.clone() for key, value in state["p"].items()}
        self.state.q_memory_dict = {key: value.clone() for key, value in state["q"].items()}
        key = state["rng"].numpy().astype(np.uint32)
        self.state.rng.set_state({"bit_generator": "MT19937", "state": {"key": key, "pos": state["rng_position"]}})

    def _num_sent(self, shape: torch.Size) -> int:
        """Elements that travel for one gradient: r (n + m), or all n m of them where that saves too little."""
        n = shape[0] if shape else 1
        m = math.prod(shape[1:])
        factors = (n + m) * min(n, m, self.state.matrix_approximation_rank)
        return factors if factors * self.state.min_compression_rate < n * m else n * m
