"""Follows the memory of what operations make, from the moment that they make it until nobody holds it."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class StorageFollower(TorchDispatchMode):
    """While it is entered, notes each storage that an operation makes, and when it is freed, in order.

    Storages of tensors without memory count as if they had some. What a kernel takes for itself is not seen.

    given: tensors whose memory is not that of operations.

    Attributes:
        num_events: how often memory came or went so far.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self._given = {each.untyped_storage()._cdata for each in given}
        # Of storages that are held, by address; an address is used again.
        self._numbers: dict[int, int] = {}
        self._sizes: list[int] = []
        self._events: list[tuple[int, int]] = []

    @property
    def num_events(self) -> int:
        return len(self._events)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor):
                self._follow(each.untyped_storage())
        return found

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._numbers or key in self._given:
            return
        number = self._numbers[key] = len(self._sizes)
        self._sizes.append(storage.nbytes())
        self._events.append((number, 1))
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._events.append((self._numbers.pop(key), -1))

    def peak_bytes(self, without: Collection[Tensor] = (), last: int | None = None) -> int:
        """The most that was held at a time, in the first `last` events.

        without: tensors that are still held, and do not count.
        """
        left_out = {self._numbers.get(each.untyped_storage()._cdata) for each in without}
        changes = [0 if number in left_out else change * self._sizes[number] for number, change in self._events]
        return max(accumulate(changes[:last]), default=0)
