"""Orders of a pipeline on slow links, with held computing: measured, simulated, and torch's runtime in the same run.

    thinwire lab --nodes 4 --rate 100mbit -- python benchmarks/pipeline.py --rate 12.5e6 [--micro-batches 32]
    torchrun --nproc-per-node 4 benchmarks/pipeline.py [--only fitted --torch] [--micro-batches 8] [--repeats 1]

A row takes about 6 s for each repeat and one more, with 32 micro-batches. `--only`: the rows of these orders alone, and
torch's where `--torch` is stated too.

Without `--rate` the links are those of one machine, which take next to no time. Each stage sleeps for its computing, so
that stages on few cores don't take turns: 50 ms forward and 100 ms backward for a micro-batch, messages of 0.52 MB.
Prints for each order the median seconds of a step, what `simulate` said, how many times as fast it is as the 1F1B of
torch.distributed.pipelining, and how many times as long it takes as without a link; then the median error of the
simulation. The lab's links are token buckets, which `simulate` knows: a link that has rested lets the bytes of 20 ms
pass at once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from thinwire.collectives import Mailbox, Topology
from thinwire.cost import Network
from thinwire.hosts.pipeline import Runner
from thinwire.methods.pipeline import Costs, Plan, fitted, plan, simulate
from thinwire.methods.pipeline.border import Crossing

FORWARD_S = 0.05
ROWS, FEATURES = 508, 256
# Orders; with "-few": with 8 bits forward and 4 back.
NAMES = ("1f1b", "interleaved", "looped-bfs", "v-half", "gpipe", "fitted", "1f1b-few", "fitted-few")
# Of a frame of Ethernet what TCP's payload is.
PAYLOAD = 1448 / 1514
# Of which the token buckets of the lab's links hold the bytes.
BURST_S = 0.02


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds)
        return grads[0], grads[0].sum(0), None


class Stage(nn.Module):
    """Computes nothing, slowly."""

    def __init__(self, seconds: float, is_last: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES))
        self.seconds, self.is_last = seconds, is_last

    def forward(self, hidden: Tensor | None, micro_batch: Tensor | None = None) -> Tensor:
        given = micro_batch if hidden is None else hidden
        assert given is not None
        left = _Held.apply(given, self.weight, self.seconds)
        return left.square().mean() if self.is_last else left


def timed(step: Callable[[], object], repeats: int) -> float:
    """The median over repeats of the slowest rank's seconds; the first step is not counted."""
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        step()
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        found.append(took.item())
    return statistics.median(found[1:])


def of_torch(num_micro_batches: int, repeats: int) -> float:
    """torch's own 1F1B."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(Stage(FORWARD_S), rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=lambda left, target: left.square().mean())
    whole = torch.randn(num_micro_batches * ROWS, FEATURES)

    def step() -> None:
        args = (whole,) if rank == 0 else ()
        targets: dict[str, Any] = {"target": whole} if rank == num_ranks - 1 else {}
        schedule.step(*args, **targets)

    return timed(step, repeats)


def ours(made: Plan, mailbox: Mailbox, crossing: Crossing, repeats: int) -> float:
    """One of thinwire's orders."""
    seconds = FORWARD_S * made.num_ranks / len(made.home)
    chunks = {chunk: Stage(seconds, is_last=chunk == len(made.home) - 1) for chunk in made.chunks_of(mailbox.rank)}
    runner = Runner(made, chunks, mailbox, lambda chunk, micro_batch: tuple(micro_batch.shape), crossing=crossing)
    micro_batches = [torch.randn(ROWS, FEATURES)] * made.num_micro_batches
    return timed(lambda: runner.run(micro_batches), repeats)


def main() -> None:
    """Print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, help="bytes per second of the lab's links")
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="append", choices=NAMES, help="an order to run; by default all of them")
    parser.add_argument("--torch", action="store_true", help="run torch's 1F1B beside --only")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    num_ranks, num = dist.get_world_size(), args.micro_batches
    mailbox = Mailbox(None, Topology(num_ranks, 1))
    links = Network.even(num_ranks)
    if args.rate is not None:
        links = Network.even(num_ranks, rate=args.rate * PAYLOAD, delay_s=0.0005, burst_s=BURST_S)

    def costs(made: Plan, crossing: Crossing) -> Costs:
        forward, backward = (
            float(crossing.packet_bytes(direction, ROWS * FEATURES, torch.float32))
            for direction in ("forward", "backward")
        )
        seconds = FORWARD_S * num_ranks / len(made.home)
        return Costs.even(len(made.home), seconds, forward_bytes=forward, backward_bytes=backward)

    exact, few = Crossing(), Crossing("int8/64:nearest", "int4/64")
    one = plan("1f1b", num_ranks, num)
    rows = []
    for name in args.only or NAMES:
        order, crossing = name.removesuffix("-few"), few if name.endswith("-few") else exact
        made = fitted(one.home, one.paths, costs(one, crossing), links) if order == "fitted" else None
        rows.append((name, made or plan(order, num_ranks, num), crossing))
    reference = of_torch(num, args.repeats) if args.torch or not args.only else None
    free = simulate(one, costs(one, exact)).makespan_s
    if dist.get_rank() == 0:
        print(f"no link: {free:.2f} s" + ("" if reference is None else f"\n1f1b of torch: {reference:.2f} s"))
    errors = []
    for name, made, crossing in rows:
        took = ours(made, mailbox, crossing, args.repeats)
        predicted = simulate(made, costs(made, crossing), links).makespan_s
        errors.append(abs(predicted / took - 1))
        if dist.get_rank() == 0:
            slower = took / simulate(made, costs(made, crossing)).makespan_s
            said = f"{took:.2f} s, simulated {predicted:.2f} s, {slower:.2f} times as long as no link"
            said += "" if reference is None else f", {reference / took:.2f} times torch's 1f1b"
            print(f"{name}: {said}", flush=True)
    if dist.get_rank() == 0:
        print(f"median error of the simulation over {len(errors)} orders: {statistics.median(errors):.1%}")
    mailbox.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
