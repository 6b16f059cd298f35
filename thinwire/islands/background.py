"""Shared by methods whose ranks have no common step: a thread beside training, and the model as one vector."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thinwire.layout.layout import Layout


class Background:
    """A thread beside training. `check` raises its error, and the error wakes everything that waits for `changed`."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.changed = threading.Condition()
        self._run = run
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the thread, if any."""
        if self._error is not None:
            raise self._error

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Block until the condition holds, with `changed` held. Raises the error that ended the thread."""
        self.changed.wait_for(lambda: self._error is not None or condition())
        self.check()

    def join(self) -> None:
        """Wait until the thread has ended. Raises the error that ended it."""
        self._thread.join()
        self.check()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            with self.changed:
                self._error = error
                self.changed.notify_all()


class FlatModel:
    """The trained parameters as one flat fp32 vector on the CPU."""

    def __init__(self, trained: Mapping[str, Tensor]) -> None:
        self.trained, self.tensors = trained, list(trained.values())
        self.layout = Layout.of({name: tensor.shape for name, tensor in trained.items()})
        self.lengths, self.numel = self.layout.lengths, self.layout.numel

    @torch.no_grad()
    def read(self) -> Tensor:
        """A copy of the parameters."""
        return self.layout.flat(self.trained)

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Overwrite the parameters."""
        for name, part in self.layout.views(values).items():
            self.trained[name].copy_(part)

    def gradient(self) -> Tensor:
        """A copy of the gradients; zeros for parameters without one."""
        return self.layout.pack((tensor.grad for tensor in self.tensors), self.layout.zeros())
