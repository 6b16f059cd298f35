"""The loss of a large vocabulary, forward and backward: seconds and memory of each implementation beside plain logits.

    python benchmarks/losses.py [--tokens 1024 --width 384 --vocabulary 16384] [--rounds 7]

fp32 unless --dtype says otherwise. Implementations take turns, so that all see the same machine; seconds are medians.
Extra memory is the peak of the bytes of all tensors made, less the two gradients, from a run of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.hosts.offload.storages import StorageFollower
from thinwire.losses import cut_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
    """As the models here compute it."""
    return F.cross_entropy((e @ c.T).float(), targets)


def by(impl: str) -> Loss:
    """An implementation of cut_cross_entropy."""
    return lambda e, c, targets: cut_cross_entropy(e, c, targets, impl=impl)


def step(loss: Loss, e: Tensor, c: Tensor, targets: Tensor) -> None:
    """One forward and backward."""
    e.grad = c.grad = None
    loss(e, c, targets).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 1024), ("width", 384), ("vocabulary", 16384), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    draw, dtype = torch.Generator().manual_seed(0), getattr(torch, args.dtype)
    e = torch.randn(args.tokens, args.width, generator=draw).to(dtype).requires_grad_()
    c = (torch.randn(args.vocabulary, args.width, generator=draw) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(0, args.vocabulary, (args.tokens,), generator=draw)
    losses = {"plain": plain, "fused": by("fused"), "tiles": by("tiles")}
    if hasattr(F, "linear_cross_entropy"):
        losses["torch's chunked"] = by("torch")
    taken: dict[str, list[float]] = {name: [] for name in losses}
    for number in range(args.rounds + 1):
        for name, loss in losses.items():
            start = time.perf_counter()
            step(loss, e, c, targets)
            if number:
                taken[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    extra = {}
    for name, loss in losses.items():
        e.grad = c.grad = None
        with StorageFollower(e, c) as storages:
            step(loss, e, c, targets)
        extra[name] = storages.peak_bytes() - e.nbytes - c.nbytes
    print(f"N {args.tokens}, D {args.width}, V {args.vocabulary}, {args.dtype}, {torch.get_num_threads()} thread(s)")
    print(f"{'':16} {'ms':>8} {'of plain':>9} {'extra MB':>9} {'of plain':>9}")
    for name in losses:
        print(
            f"{name:16} {1e3 * seconds[name]:8.1f} {seconds[name] / seconds['plain']:9.2f} {extra[name] / 1e6:9.2f} "
            f"{extra[name] / extra['plain']:9.3f}"
        )


if __name__ == "__main__":
    main()
