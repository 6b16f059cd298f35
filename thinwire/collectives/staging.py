"""CUDA tensors on the communication thread: side streams, and pinned memory for the network.

gloo reads and writes CPU memory only. Codecs run on the device, on a side stream, and only their packets are copied to
pinned memory. A message is posted when its copy is complete. Without CUDA the functions here do nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.collectives.rounds import Awaited, Rounds
from thinwire.errors import ConfigError

CPU = torch.device("cpu")
T = TypeVar("T")


def allocate(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 memory. In a process that uses CUDA, CPU memory is pinned: copies then need no thread to wait for them."""
    pinned = device == CPU and torch.cuda.is_initialized()
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def must_stage(tensor: Tensor) -> bool:
    """Whether the tensor travels through a copy on the CPU. Raises ConfigError for a device that jobs can't use."""
    if tensor.device == CPU:
        return False
    if not tensor.is_cuda or tensor.device.index != torch.cuda.current_device():
        raise ConfigError(
            f"a tensor on {tensor.device} can't be sent: it must be on the CPU or on the current CUDA device; "
            "call torch.cuda.set_device first"
        )
    return True


def to_host(message: Tensor, held: Tensor) -> None:
    """Queue a copy from the device to pinned memory on the current stream. `queued` tells when it is complete."""
    held.copy_(message, non_blocking=True)


def to_device(held: Tensor, message: Tensor) -> None:
    """Queue a copy from pinned memory to the device on the current stream."""
    message.copy_(held, non_blocking=True)


@dataclass(frozen=True)
class StreamDone:
    """All work queued on a stream up to now."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


def queued() -> list[Awaited]:
    """The unfinished work of the current stream."""
    return unfinished(torch.cuda.current_stream()) if torch.cuda.is_initialized() else []


def unfinished(stream: torch.cuda.Stream) -> list[Awaited]:
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return [] if event.query() else [StreamDone(event)]


@dataclass(frozen=True)
class OriginStream:
    """The stream of the thread that submits a job, and an event for the work queued on it so far."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event

    @classmethod
    def here(cls) -> OriginStream | None:
        """The current stream of this thread; None if CUDA is not in use."""
        if not torch.cuda.is_initialized():
            return None
        stream = torch.cuda.current_stream()
        return cls(stream, stream.record_event())


@functools.cache
def side_stream(device: torch.device, slot: int) -> torch.cuda.Stream:
    """The side stream of a slot. Each slot has one: a job must not wait for the gradients of the next one."""
    return torch.cuda.Stream(device)


def beside(rounds: Rounds[T], origin: OriginStream | None, slot: int) -> Rounds[T]:
    """Run the job's device work on a side stream after the work that `origin` had queued. End when that work is done.

    The result may then be used on any stream, and the job's tensors may be freed. The result's memory belongs to the
    side stream and is marked as used on the origin's stream.
    """
    if origin is None:
        return (yield from rounds)
    stream = side_stream(origin.stream.device, slot)
    stream.wait_event(origin.event)
    error: Exception | None = None
    while True:
        try:
            with torch.cuda.stream(stream):
                awaited = next(rounds) if error is None else rounds.throw(error)
        except StopIteration as end:
            if waiting := unfinished(stream):
                yield waiting
            _mark_used(end.value, origin.stream)
            return end.value
        try:
            yield awaited
            error = None
        except Exception as failure:
            error = failure


def _mark_used(result: Any, stream: torch.cuda.Stream) -> None:
    if isinstance(result, Tensor) and result.is_cuda:
        result.record_stream(stream)
