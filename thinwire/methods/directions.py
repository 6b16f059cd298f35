"""Random directions in weight space: drawn when needed, the same on every rank, never stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.codecs import derive_seed
from thinwire.codecs.normals import add_normals

Sample = tuple[int, int]
# Elements per piece of work of a thread.
PIECE = 1 << 17


class Directions:
    """One normal number for each trained element, as a function of (seed, step, rank, k).

    Holds one buffer as large as the trained parameters: the moved weights while a loss is measured, the gradient while
    the optimizer steps. The weights themselves are only read, so they are the same bits after a measurement.
    """

    def __init__(self, trained: Mapping[str, Tensor], seed: int) -> None:
        self.seed = seed
        self.trained = list(trained.values())
        self.num_elements = sum(tensor.numel() for tensor in self.trained)
        self._buffers = [torch.empty(tensor.shape) for tensor in self.trained]
        threads = torch.get_num_threads() if self.num_elements > PIECE else 1
        self._map: Callable[..., Iterable[object]] = ThreadPoolExecutor(threads).map if threads > 1 else map
        # Compile here instead of in the first step.
        add_normals(0, torch.empty(0), torch.empty(0), [], [])

    @contextmanager
    def moved(self, step: int, sample: Sample, distance: float) -> Iterator[None]:
        """Context in which the weights are w + distance z."""
        masters = [tensor.data for tensor in self.trained]
        self._add(masters, step, [sample], [distance])
        try:
            for tensor, buffer in zip(self.trained, self._buffers, strict=True):
                tensor.data = buffer
            yield
        finally:
            for tensor, master in zip(self.trained, masters, strict=True):
                tensor.data = master

    @contextmanager
    def gradient(self, step: int, samples: Sequence[Sample], weights: Sequence[float]) -> Iterator[None]:
        """Context in which `.grad` is sum_i weights[i] z_i, in fp32, added in this order; outside it is None."""
        for buffer in self._buffers:
            buffer.zero_()
        self._add(self._buffers, step, samples, weights)
        try:
            for tensor, buffer in zip(self.trained, self._buffers, strict=True):
                tensor.grad = buffer
            yield
        finally:
            for tensor in self.trained:
                tensor.grad = None

    def _add(self, bases: Sequence[Tensor], step: int, samples: Sequence[Sample], scales: Sequence[float]) -> None:
        seeds = [derive_seed(self.seed, step, rank, k) for rank, k in samples]

        def add(piece: tuple[int, Tensor, Tensor]) -> None:
            add_normals(*piece, seeds, scales)

        list(self._map(add, self._pieces(bases)))

    def _pieces(self, bases: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (number of the first element, base, buffer) of pieces; cutting does not change the result."""
        counter = 0
        for base, buffer in zip(bases, self._buffers, strict=True):
            for piece in zip(base.reshape(-1).split(PIECE), buffer.view(-1).split(PIECE), strict=True):
                yield counter, *piece
                counter += piece[1].numel()
