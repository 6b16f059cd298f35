"""torch's own PowerSGD hook, for comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from thinwire.collectives.link import Link
from thinwire.collectives.ring import BY_FORMULA, count_ring, ring_bytes
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError
from thinwire.layout.zeros import WEIGHTS
from thinwire.methods.ddp import DDPMethod
from thinwire.methods.options import check_types
from thinwire.methods.reduction import FP32_BYTES, OPERATION, Bucket, Reduction, Step
from thinwire.state.memory import MeanMerge, Merge, Place, State
from thinwire.table import Row


@dataclass(frozen=True)
class TorchPowerSGD(DDPMethod):
    """torch's PowerSGD hook: sends each gradient matrix as two thin ones, and adds the loss to the next gradient.

    M (n x m) is sent as P = M Q (n x r) and Q = M^T P (m x r), P orthonormal, both summed over ranks. M is replaced by
    P Q^T, and M - P Q^T is kept. Vectors travel in fp32. All gradients are one bucket, reduced after backward.

    Raises ConfigError for a rank below 1, a start_step below 2, a min_compression below 1.
    Source: Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1 and 2.
    """

    single_bucket = True

    rank: int = 4
    """Columns r of P and Q; at least 1."""
    start_step: int = 10
    """First step that is compressed, from 2; steps before it travel in fp32."""
    min_compression: float = 2.0
    """Compress a matrix only where (n + m) r is this many times smaller than n m, else send it in fp32; at least 1."""
    find_unused_parameters: bool = False
    """DDP's own option; set it for a model that leaves out parameters in some steps."""

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

    def reduction(self, place: Place, seed: int) -> Reduction:
        return HookMean(self, place, seed)


# torch keeps errors by bucket. There is one bucket, the same in every world.
BUCKETS = "error feedback of torch's buckets"


class HookMean(Reduction):
    """torch's powerSGD_hook, which starts one collective when another ends.

    This is safe only if nothing else uses the group meanwhile, so the communication thread waits for it.
    """

    is_metered = False

    def __init__(self, method: TorchPowerSGD, place: Place, seed: int) -> None:
        super().__init__(place)
        self.hook = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=method.rank,
            start_powerSGD_iter=method.start_step,
            min_compression_rate=method.min_compression,
            # Prevents 0/0 for a column of zeros at rank 1 or 2. Higher ranks use a QR decomposition.
            orthogonalization_epsilon=1e-8,
            random_seed=seed % (1 << 32),
        )
        # The hook can't continue with P but without Q.
        self.state = State(place, together=True)
        error, p, q = self.hook.error_dict, self.hook.p_memory_dict, self.hook.q_memory_dict
        self.state.add("error", MeanMerge(BUCKETS), row="error feedback", tensors=error)
        self.state.add("p", Merge.SAME, self._p_shape, row="factors", tensors=p)
        self.state.add("q", Merge.SAME, self._q_shape, row="factors", tensors=q)
        self.state.add_attributes(self.hook, "iter")
        self.state.add_attributes(self, "rng")

    def run(self, link: Link, bucket: Bucket, step: Step) -> Rounds[None]:
        yield from ()
        state = self.hook
        state.process_group = link.wire.group
        is_plain, before = state.iter < state.start_powerSGD_iter, state.total_numel_after_compression
        with link.timed("wait_s", OPERATION):
            powerSGD_hook(state, cast(dist.GradBucket, bucket)).wait()
        thin_bytes = FP32_BYTES * (state.total_numel_after_compression - before)
        count_ring(link, OPERATION, bucket.flat.nbytes if is_plain else thin_bytes)

    def sent_bytes(self) -> dict[str, int]:
        shapes = self.place.shapes.values()
        return ring_bytes(FP32_BYTES * sum(self._num_sent(shape) for shape in shapes), self.place.grid)

    def rows(self) -> list[Row]:
        rank, start, shapes = self.hook.matrix_approximation_rank, self.hook.start_powerSGD_iter, self.place.shapes
        thin = sum(self._is_thin(shape) for shape in shapes.values())
        return [
            ("gradients", f"{thin} of {len(shapes)} as factors of rank {rank}, the others in fp32", "by torch's hook"),
            ("steps in fp32", f"the first {start}", "start_step"),
            (WEIGHTS, "change, outside of whole rows and columns", "a product of factors is zero only there"),
            BY_FORMULA,
        ]

    @property
    def rng(self) -> dict[str, Any]:
        """numpy's Mersenne Twister, which draws the first Q: its 624 words and the position."""
        rng = self.hook.rng.get_state(legacy=False)["state"]
        return {"key": torch.from_numpy(rng["key"].astype(np.int64)), "position": int(rng["pos"])}

    @rng.setter
    def rng(self, saved: dict[str, Any]) -> None:
        state = {"key": saved["key"].numpy().astype(np.uint32), "pos": saved["position"]}
        self.hook.rng.set_state({"bit_generator": "MT19937", "state": state})

    def _p_shape(self, name: str, shape: torch.Size) -> torch.Size | None:
        return torch.Size([shape[0], self._rank_of(shape)]) if self._is_thin(shape) else None

    def _q_shape(self, name: str, shape: torch.Size) -> torch.Size | None:
        return torch.Size([math.prod(shape[1:]), self._rank_of(shape)]) if self._is_thin(shape) else None

    def _rank_of(self, shape: torch.Size) -> int:
        return min(*_matrix(shape), self.hook.matrix_approximation_rank)

    def _is_thin(self, shape: torch.Size) -> bool:
        n, m = _matrix(shape)
        return (n + m) * self._rank_of(shape) * self.hook.min_compression_rate < n * m

    def _num_sent(self, shape: torch.Size) -> int:
        """Elements sent for one gradient: r (n + m), or all n m if that saves too little."""
        return sum(_matrix(shape)) * self._rank_of(shape) if self._is_thin(shape) else shape.numel()


def _matrix(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns; further dimensions count as columns."""
    return (shape[0] if shape else 1), math.prod(shape[1:])
