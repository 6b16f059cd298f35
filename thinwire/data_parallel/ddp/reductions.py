"""How the gradients of one bucket become their mean over the ranks: torch's collectives as communication jobs."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from thinwire.collectives.algorithms import Link

FP32_BYTES, BF16_BYTES = 4, 2
OPERATION = "gradients"


@dataclass(frozen=True)
class Bucket:
    """What a GradBucket says, for use after DDP's hook has returned. grads: views into `flat`, one a parameter."""

    number: int
    flat: Tensor
    grads: list[Tensor]
    last: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.grads

    def is_last(self) -> bool:
        return self.last


@dataclass(frozen=True)
class AllReduce:
    """A sum over all ranks, in place and by gloo, that the communication thread can wait for."""

    link: Link
    work: dist.Work

    @classmethod
    def start(cls, link: Link, tensor: Tensor) -> AllReduce:
        work = dist.all_reduce(tensor, group=link.wire.group, async_op=True)
        assert work is not None
        return cls(link, work)

    def wait(self) -> None:
        with self.link.timed("wait_s", OPERATION):
            self.work.wait(timedelta(seconds=self.link.wire.timeout_s))


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """Payload of a ring all_reduce: P-1 of P parts to sum, then again to spread."""
    return 2 * (world_size - 1) * num_bytes // world_size


class Reduction(Protocol):
    """A way to average buckets, with what it remembers between steps."""

    def run(self, link: Link, bucket: Bucket) -> Generator[Any, None, int]:
        """Overwrite the bucket with the mean over ranks; a job that returns the bytes all-reduced to that end."""
        ...

    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """The bytes that a step all-reduces for gradients of these shapes, once the method is under way."""
        ...

    def kept_bytes(self, shapes: Sequence[torch.Size]) -> dict[str, int]:
        """The bytes that are remembered between steps, by name."""
        ...

    def rows(self, shapes: Sequence[torch.Size]) -> list[tuple[str, str, str]]:
        """Rows of (asked for, in effect, why)."""
        ...

    def forget(self) -> None:
        """Drop what is remembered: it has met values that are not finite."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, as tensors and numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict gave."""
        ...


class Mean:
    """g = (1/P) sum_r g_r, in fp32."""

    def run(self, link: Link, bucket: Bucket) -> Generator[Any, None, int]:
        yield [AllReduce.start(link, bucket.flat.div_(link.topology.world_size))]
        return bucket.flat.nbytes

    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        return FP32_BYTES * sum(shape.numel() for shape in shapes)

    def kept_bytes(self, shapes: Sequence[torch.Size]) -> dict[str, int]:
        return {}

    def rows(self, shapes: Sequence[torch.Size]) -> list[tuple[str, str, str]]:
        return [("gradients", "all_reduce in fp32", "by gloo")]

    def forget(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class CastMean(Mean):
    """g = sum_r bf16(g_r / P), summed in bf16 hop by hop."""

    def run(self, link: Link, bucket: Bucket) -> Generator[Any, None, int]:
        with link.timed("encode_s", OPERATION):
            half = bucket.flat.div_(link.topology.world_size).to(torch.bfloat16)
        yield [AllReduce.start(link, half)]
        with link.timed("decode_s", OPERATION):
            bucket.flat.copy_(half)
        return half.nbytes

    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        return BF16_BYTES * sum(shape.numel() for shape in shapes)

    def rows(self, shapes: Sequence[torch.Size]) -> list[tuple[str, str, str]]:
        return [("gradients", "all_reduce in bf16", "by gloo, which sums in bf16")]


class PowerSGDMean:
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

    def run(self, link: Link, bucket: Bucket) -> Generator[Any, None, int]:
        yield from ()
        state = self.state
        state.process_group = link.wire.group
        is_plain, before = state.iter < state.start_powerSGD_iter, state.total_numel_after_compression
        with link.timed("wait_s", OPERATION):
            powerSGD_hook(state, cast(dist.GradBucket, bucket)).wait()
        return bucket.flat.nbytes if is_plain else FP32_BYTES * (state.total_numel_after_compression - before)

    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        return FP32_BYTES * sum(self._num_sent(shape) for shape in shapes)

    def kept_bytes(self, shapes: Sequence[torch.Size]) -> dict[str, int]:
        thin = [num for shape in shapes if (num := self._num_sent(shape)) < shape.numel()]
        return {"error feedback": FP32_BYTES * sum(s.numel() for s in shapes), "factors": FP32_BYTES * sum(thin)}

    def rows(self, shapes: Sequence[torch.Size]) -> list[tuple[str, str, str]]:
        rank, start = self.state.matrix_approximation_rank, self.state.start_powerSGD_iter
        thin = sum(self._num_sent(shape) < shape.numel() for shape in shapes)
        return [
            ("gradients", f"{thin} of {len(shapes)} as factors of rank {rank}, the others in fp32", "by torch's hook"),
            ("steps in fp32", f"the first {start}", "start_step"),
        ]

    def forget(self) -> None:
        for held in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            held.clear()

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
