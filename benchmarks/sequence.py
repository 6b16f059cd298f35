"""Attention over several ranks beside DeepSpeed's arithmetic: four all_to_all_single of torch forward, four backward.

    thinwire lab --nodes 2 --local-size 2 --rate 100mbit -- python benchmarks/sequence.py
    torchrun --nproc-per-node 4 benchmarks/sequence.py

One layer's attention, forward and backward, fp32, causal, key heads as stated. Prints the median seconds of each way,
what a rank sends, and how many times as fast it is as the first one in the same run. That one does what DeepSpeed's
`DistributedAttention` does, and is written here, without DeepSpeed: q, k and v have a message each, and key heads are
repeated until every rank has one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from thinwire.codecs import Codec
from thinwire.collectives import Communicator
from thinwire.hosts.sequence.attention import sequence_attention
from thinwire.hosts.sequence.wire import SequenceWire
from thinwire.methods.sequence import SequenceLayout, tokens_of

WIDTH = 64


class _Swap(torch.autograd.Function):
    """All tokens of some heads for some tokens of all heads, or back, by one all_to_all_single."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scatters: int) -> Tensor:
        ctx.scatters = scatters
        return _swap(x, scatters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _swap(grads[0], 3 - ctx.scatters), None


def _swap(x: Tensor, scatters: int) -> Tensor:
    """x: [batch, heads, tokens, d]; scatters: dimension 1 or 2; the other one is gathered."""
    world_size = dist.get_world_size()
    sends = torch.stack(x.chunk(world_size, scatters)).contiguous()
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends)
    return torch.cat(list(receives), 3 - scatters)


def like_deepspeed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k and v each by a message of its own, and nothing beside it."""
    missing = max(1, dist.get_world_size() // k.shape[1])
    q, k, v = (_Swap.apply(x, 1) for x in (q, k.repeat_interleave(missing, 1), v.repeat_interleave(missing, 1)))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return _Swap.apply(out, 2)


def seconds(attention: Callable[..., Tensor], tensors: list[Tensor]) -> float:
    """Of forward and backward together; all ranks begin at once."""
    dist.barrier()
    start = time.perf_counter()
    out = attention(*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out))
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = Communicator(local_size=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layouts = [SequenceLayout(n, world_size // n) for n in range(1, world_size + 1) if world_size % n == 0][::-1]
    draw = torch.Generator().manual_seed(rank)
    sizes = (args.heads, args.kv_heads, args.kv_heads)
    tensors = [
        torch.randn(1, heads, args.tokens // world_size, WIDTH, generator=draw).requires_grad_() for heads in sizes
    ]
    ways: dict[str, Callable[..., Tensor]] = {"DeepSpeed's arithmetic": like_deepspeed}
    for layout in layouts:
        assert len(tokens_of(layout, rank, args.tokens)) == args.tokens // world_size
        for name in ("fp32", "bf16", "int8/64:nearest"):
            codec = None if name == "fp32" else Codec.parse(name)
            ways[f"{layout}, {name}"] = partial(
                sequence_attention, wire=SequenceWire(comm, codec, codec), layout=layout
            )
    taken: dict[str, list[float]] = {name: [] for name in ways}
    sent = dict.fromkeys(ways, 0)
    # In turns, so that all see the same machine. The first turn warms up.
    for turn in range(args.steps + 1):
        for name, way in ways.items():
            before = comm.meter.snapshot().sent_bytes
            taken[name] += [seconds(way, tensors)] * bool(turn)
            sent[name] = comm.meter.snapshot().sent_bytes - before
    comm.close()
    if rank == 0:
        print(f"{world_size} ranks, {args.tokens} tokens, {args.heads} heads, {args.kv_heads} key heads of {WIDTH}")
        medians = {name: statistics.median(each) for name, each in taken.items()}
        base_s = medians["DeepSpeed's arithmetic"]
        for name, took_s in medians.items():
            shown = f"{sent[name] / 1e6:7.3f} MB" if sent[name] else " " * 10
            print(f"{name:34} {1e3 * took_s:8.1f} ms  {shown}  {base_s / took_s:5.2f} x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
