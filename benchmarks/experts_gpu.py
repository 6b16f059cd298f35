"""Experts, their messages in chunks, and attention of long sequences on GPUs: what processors alone can't show.

    torchrun --nproc-per-node 8 benchmarks/experts_gpu.py
    torchrun --nproc-per-node 2 benchmarks/experts_gpu.py --device cpu --tokens 128 --hidden 64 --inner 96 --longest 256

Three tables, medians of --rounds after a warm-up, of the slowest rank. A layer of experts on one rank: the grouped
product beside one product for each expert. The same spread over all ranks, in several numbers of chunks in forward and
in backward: products hide messages only where they have a unit of their own. Attention over all ranks for sequences
that grow twofold up to --longest tokens or as far as memory goes, with the peak of a rank's memory. Messages go by
gloo, through the processor's memory. It has not run on a GPU yet; its half for a processor is a test.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import ConfigError, ExpertParallel, expert_parallel
from thinwire.collectives import Communicator
from thinwire.hosts.sequence.attention import sequence_attention
from thinwire.hosts.sequence.wire import SequenceWire
from thinwire.methods.sequence import SequenceLayout
from thinwire.methods.sequence.layout import layouts
from thinwire.models.experts import grouped_product, loop_product
from thinwire.models.moe import Experts, MoEConfig

EXPERTS, TOP_K, HEADS, KV_HEADS, WIDTH = 8, 2, 16, 2, 64
# In forward, and in backward.
CHUNKS = ((1, 1), (2, 2), (4, 4), (8, 8), (4, 8), (8, 4))


def median_s(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Of the slowest rank, until its device is done."""
    taken = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        taken.append(float(took))
    return statistics.median(taken[1:])


def experts_on(device: torch.device, hidden: int, inner: int) -> Experts:
    """A layer's experts with random weights, the same on all ranks."""
    torch.manual_seed(0)
    made = Experts(MoEConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=EXPERTS)).to(device)
    for param in made.parameters():
        nn.init.normal_(param, std=0.02)
    return made


def given_to(device: torch.device, tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's tokens, the experts of each, and their weights."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    index = torch.rand(tokens, EXPERTS, generator=draw).topk(TOP_K, -1).indices
    x, weights = torch.randn(tokens, hidden, generator=draw), torch.full((tokens, TOP_K), 1 / TOP_K)
    return x.to(device), index.to(device), weights.to(device)


def layer(args: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """One product for all experts beside one for each."""
    rows = torch.randn(args.tokens, args.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weights = torch.randn(EXPERTS, args.hidden, args.inner, device=device, dtype=torch.bfloat16).requires_grad_()
    counts = torch.full((EXPERTS,), args.tokens // EXPERTS, device=device)
    counts[0] += args.tokens - int(counts.sum())
    found = {}
    for name, product in (("one for each", loop_product), ("grouped", grouped_product)):

        def run(product: Callable[[Tensor, Tensor, Tensor], Tensor] = product) -> None:
            product(rows, weights, counts).float().square().sum().backward()

        found[name] = median_s(run, device, args.rounds)
        yield f"product of experts, {name:14} {1e3 * found[name]:9.3f} ms  {found['one for each'] / found[name]:6.2f} x"


def chunks(args: argparse.Namespace, device: torch.device, local_size: int) -> Iterator[str]:
    """The layer over all ranks, by its numbers of chunks."""
    ranks, first_s = dist.get_world_size(), 0.0
    x, index, weights = given_to(device, args.tokens, args.hidden)
    for forward, backward in CHUNKS:
        model = nn.Module()
        model.experts = module = experts_on(device, args.hidden, args.inner)
        options = ExpertParallel(ranks, chunks=forward, chunks_back=backward)
        ep = expert_parallel(model, options, local_size=local_size)

        def run(module: nn.Module = module) -> None:
            module(x.clone().requires_grad_(), index, weights).square().sum().backward()

        took_s = median_s(run, device, args.rounds)
        first_s = first_s or took_s
        ep.close()
        yield f"layer, chunks {forward} and {backward} back {1e3 * took_s:16.3f} ms  {first_s / took_s:6.2f} x"


def attention(args: argparse.Namespace, device: torch.device, comm: Communicator) -> Iterator[str]:
    """Attention over all ranks in each layout, for longer and longer sequences."""
    wire, unit = SequenceWire(comm), 2 * comm.world_size
    for layout in layouts(comm.world_size):
        tokens = max(unit, args.tokens // unit * unit)
        while tokens <= args.longest and layout.ulysses <= HEADS:
            try:
                took_s, peak = attended(args, device, wire, layout, tokens // comm.world_size)
            except torch.cuda.OutOfMemoryError:
                yield f"attention, {layout}, {tokens:,} tokens: more than a rank's memory"
                break
            shown = f"{peak / 1e6:10.1f} MB" if peak else ""
            yield f"attention, {layout!s:20} {tokens:10,} tokens {1e3 * took_s:10.2f} ms {shown}"
            tokens *= 2


def attended(
    args: argparse.Namespace, device: torch.device, wire: SequenceWire, layout: SequenceLayout, tokens: int
) -> tuple[float, int]:
    """Seconds of forward and backward, and the peak of the device's memory; 0 on a processor. tokens: of a rank."""
    draw = torch.Generator().manual_seed(wire.comm.rank)
    q, k, v = (
        torch.randn(1, heads, tokens, WIDTH, generator=draw).to(device, torch.bfloat16).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)

    def run() -> None:
        sequence_attention(q, k, v, wire, layout).float().square().sum().backward()

    took_s = median_s(run, device, args.rounds)
    return took_s, torch.cuda.max_memory_allocated(device) if is_gpu else 0


def main(given: Sequence[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14336)
    parser.add_argument("--longest", type=int, default=1 << 20, help="tokens of a whole sequence")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(given)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine has no GPU; nearest: --device cpu, with small sizes")
    starts = not dist.is_initialized()
    if starts:
        dist.init_process_group("gloo")
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    comm, lines = Communicator(local_size=local_size), list[str]()
    for part in (layer(args, device), chunks(args, device, local_size), attention(args, device, comm)):
        for line in part:
            lines.append(line)
            if dist.get_rank() == 0:
                print(line, flush=True)
    comm.close()
    if starts:
        dist.destroy_process_group()
    return lines


if __name__ == "__main__":
    main()
