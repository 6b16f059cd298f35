"""The device of a process: the CPU, or one GPU. Only `collectives/staging.py`, for messages, calls torch.cuda too.

`Device` is the CPU, `Cuda` a GPU. Each method that a GPU overrides is one or two calls of torch.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.limits import STATM, data_bytes, limit_bytes

# Where Linux keeps control groups, and in which of them this process is.
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_limits() -> list[tuple[float, float]]:
    """Of each control group with a memory limit that holds this process, such as a container: its bytes, and the free.

    Pages of files that were not read lately count as free. Source: Linux's documentation of cgroup v2 and v1.
    """
    found: list[tuple[float, float]] = []
    with suppress(OSError, ValueError):
        for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:
                root, names, files = GROUPS, ("memory.max", "memory.current"), "inactive_file"
            elif "memory" in kinds.split(","):
                root, files = GROUPS / "memory", "total_inactive_file"
                names = "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            own = root / path.strip("/")
            # In a container its group may be mounted as the root, whatever its path is outside.
            for group in (each for each in (own, *own.parents) if each.is_relative_to(root)):
                # A group without a limit has no such files, or "max" in them.
                with suppress(OSError, ValueError):
                    limit, used = (float((group / name).read_text(encoding="ascii")) for name in names)
                    stat = dict(each.split() for each in (group / "memory.stat").read_text().splitlines())
                    found.append((limit, limit - used + float(stat.get(files, 0))))
    return found


class Device:
    """The CPU."""

    kind = "cpu"
    # torch.distributed's backend for torch's own collectives; packets travel by gloo.
    backend = "gloo"

    def __init__(self) -> None:
        self.torch = torch.device(self.kind)

    @property
    def name(self) -> str:
        """Name of the processor; losses depend on it."""
        return "cpu"

    @property
    def fast_dtype(self) -> str | None:
        """The fast compute type, "bf16" or "fp32"; None if the launcher must measure it."""
        return None

    def place(self, model: nn.Module) -> nn.Module:
        """The model, with parameters and buffers in the device's memory."""
        return model

    def take(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Move tensors from the CPU to the device."""
        return tuple(batch)

    def autocast(self, dtype: str, *, caches: bool = True) -> torch.autocast:
        """The context of a forward pass that computes in "bf16", or leaves types alone in "fp32".

        caches: keep every weight's copy in bf16 until it ends.
        """
        return torch.autocast(self.kind, torch.bfloat16, enabled=dtype == "bf16", cache_enabled=caches)

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def memory_bytes(self, num_local: int) -> float:
        """Memory for one of the num_local processes of this machine.

        An equal share of the machine's or the container's, and no more than the process's own limit.
        """
        machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        share = min([machine, *(limit for limit, _ in memory_limits())]) / num_local
        return share if (limit := limit_bytes()) is None else min(share, limit)

    def held_bytes(self) -> int:
        """Memory that this process holds now where it computes: its RSS; 0 if the system does not say."""
        return int(STATM.read_text().split()[1]) * resource.getpagesize() if STATM.exists() else 0

    def peak_bytes(self) -> int:
        """Peak bytes of tensors in the device's memory; 0 on the CPU, whose peak is the process's RSS."""
        return 0

    def random_state(self) -> Tensor | None:
        """The state of the device's own random generator, uint8; None if torch's CPU generator is the only one."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Restore a state that `random_state` returned."""

    def seed(self, seed: int) -> None:
        """Seed the device's own random generator again; `torch.manual_seed` seeds all."""


class Cuda(Device):
    """One GPU, which becomes the current one. number: its index among the GPUs that torch sees."""

    kind = "cuda"
    # CPU tensors travel by gloo, GPU tensors by NCCL.
    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, number: int) -> None:
        torch.cuda.set_device(number)
        self.torch = torch.device("cuda", number)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    @property
    def fast_dtype(self) -> str | None:
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"

    def place(self, model: nn.Module) -> nn.Module:
        return model.to(self.torch)

    def take(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # A copy from pinned memory is only queued; this thread does not wait for it.
        return tuple(tensor.pin_memory().to(self.torch, non_blocking=True) for tensor in batch)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def memory_bytes(self, num_local: int) -> float:
        """What tensors may fill of this process's own GPU: all but what its driver and other processes hold."""
        free, _ = torch.cuda.mem_get_info(self.torch)
        return free + torch.cuda.memory_reserved(self.torch)

    def held_bytes(self) -> int:
        """Memory of this process's tensors on its GPU."""
        return torch.cuda.memory_allocated(self.torch)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch)

    def random_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self.torch)

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch)

    def seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)


def free_bytes(device: torch.device, num_local: int) -> float:
    """Memory that one of the num_local processes of this machine may still take.

    Of what is free on the machine, and in the container, an equal share; no more than what the process's own limit
    leaves it. Of a GPU, which a process has for itself, all that is free.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        machine = 1024 * float(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
        share = min([machine, *(free for _, free in memory_limits())]) / num_local
        own = share if (limit := limit_bytes()) is None else float(limit - data_bytes())
        return max(0.0, min(share, own))
    return Device().memory_bytes(num_local)


def machine_bytes() -> float:
    """Memory of this machine, and of the container that holds this process; infinite if it is not known."""
    found = [limit for limit, _ in memory_limits()]
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(1024 * float(next(line.split()[1] for line in lines if line.startswith("MemTotal"))))
    return min(found, default=float("inf"))


def num_gpus() -> int:
    """Number of GPUs that torch can use in this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(asked: str, num_workers: int) -> tuple[str, str]:
    """The kind of device on which each worker of this machine trains, "cpu" or "cuda", and the reason.

    asked: "auto", "cpu" or "cuda". Either every worker has its own GPU, or none has one. Raises ConfigError if "cuda"
    is asked for and there are too few GPUs.
    """
    found = num_gpus()
    if asked == "cpu":
        return "cpu", f"as asked, though torch sees {found} GPU(s)" if found else ""
    if found >= num_workers:
        return "cuda", f"{num_workers} of {found} GPU(s), one a worker"
    if found:
        why, nearest = f"{num_workers} workers need a GPU each, and torch sees {found}", f"--workers {found}"
    else:
        built = "sees no GPU" if torch.version.cuda else "is built without CUDA"
        why, nearest = f"this torch {built}", "--device cpu"
    if asked == "cuda":
        raise ConfigError(f"--device cuda: {why}; nearest: {nearest}")
    return "cpu", f"{why}; {nearest} trains on the GPU" if found else why


# Of the CPU, and of this process's GPU if it has one.
RandomState = tuple[Tensor, Tensor | None]


def random_state() -> RandomState:
    """The state of torch's own generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def set_random_state(state: RandomState) -> None:
    """Go on from a state that `random_state` has given."""
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def seed_generators(seed: int) -> None:
    """Seed the generators whose state `random_state` gives.

    `torch.manual_seed` does it for every kind of device, and formats a stack for each: a hundred times as long.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def is_other_state(state: RandomState) -> bool:
    """Whether numbers were drawn since `random_state` has given a state."""
    return any(
        now is not None and (then is None or not torch.equal(then, now))
        for then, now in zip(state, random_state(), strict=True)
    )


def name_of(place: torch.device) -> str:
    """Name of the GPU at which tensors lie, or "cpu"."""
    return torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"


def check_current(place: torch.device) -> None:
    """Raise ConfigError for a GPU that is not the current one."""
    if place.type == "cuda" and place.index != torch.cuda.current_device():
        raise ConfigError(
            f"the model is on {place} and the current device is cuda:{torch.cuda.current_device()}: "
            f"call torch.cuda.set_device({place.index}) first"
        )


def wait_for(place: torch.device) -> None:
    """Wait until all work that is queued on a GPU is done; the CPU has none."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def take(kind: str, number: int) -> Device:
    """The device of a worker. number: index of its GPU among those that torch sees."""
    return Cuda(number) if kind == "cuda" else Device()
