"""`auto` beside every fixed way of rows to experts: which part more its layer takes than that of the best one.

    thinwire lab --nodes 2 --local-size 2 --rate 100mbit -- python benchmarks/ways.py
    torchrun --nproc-per-node 4 benchmarks/ways.py

One layer, forward and backward, fp32, for two numbers of tokens and of experts a token: four settings; three rates make
twelve. All ways take turns, round by round, so that a busy machine slows all of them alike; medians count. `simulated`
is the way that the simulation takes for the fastest, `dictionary` the one that is left after each way near the
prediction was tried once. `--each` shows every way, predicted and measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from thinwire import ExpertParallel, expert_parallel
from thinwire.calibration.levels import measure_links
from thinwire.collectives import Communicator
from thinwire.cost.links import ALL_TO_ALL, Links
from thinwire.hosts.experts import ExpertRanks
from thinwire.methods.experts import Rows, WayDictionary, choose_way, way_text
from thinwire.models.moe import Experts, MoEConfig

HIDDEN, INNER, EXPERTS = 128, 256, 8
# Slower ones by prediction are not measured.
MOST_PREDICTED = 3.0


def passed_s(module: nn.Module, ep: ExpertRanks, way: ExpertParallel, given: tuple[torch.Tensor, ...]) -> float:
    """Seconds of a forward and backward in this way, until all ranks are done."""
    ep.take(way)
    dist.barrier()
    start = time.perf_counter()
    x = given[0].clone().requires_grad_()
    module(x, *given[1:]).sum().backward()
    dist.barrier()
    return time.perf_counter() - start


def setting(num_tokens: int, top_k: int, rounds: int, comm: Communicator, shows_each: bool) -> str:
    """A line on one setting, and one on each of its ways if `shows_each`."""
    rank, ranks, local_size = comm.rank, comm.world_size, comm.topology.local_size
    model = nn.Module()
    model.experts = module = Experts(MoEConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS))
    for param in module.parameters():
        nn.init.normal_(param, std=0.02)
    ep = expert_parallel(model, ExpertParallel(ranks), local_size=local_size)
    draw = torch.Generator().manual_seed(rank)
    index = torch.rand(num_tokens, EXPERTS, generator=draw).topk(top_k, -1).indices
    given = torch.randn(num_tokens, HIDDEN, generator=draw), index, torch.full((num_tokens, top_k), 1 / top_k)
    rows = Rows.even(ep.placement, num_tokens, top_k, HIDDEN, torch.float32, comm.topology.num_nodes)
    links = measure_links(comm, (2, INNER, HIDDEN), [ALL_TO_ALL])
    options = ExpertParallel(ranks, move="auto", route="auto", chunks="auto")
    how = ep.placement, rows, 3 * EXPERTS * HIDDEN * INNER // ranks, local_size, links
    predicted = choose_way(options, *how)
    first, least_s = next(iter(predicted)), min(predicted.values())
    ways = WayDictionary(options, first, ep.placement, how[2], local_size, 1, links)
    while True:
        passed_s(module, ep, ways.ways[ways.now], given)
        told = torch.tensor(ways.note(ep.watch.take(), rows, 1.0) if rank == 0 else 0)
        dist.broadcast(told, 0)
        ways.take(int(told))
        left = torch.tensor(len(ways.load(rows, 1.0).untried))
        dist.broadcast(left, 0)
        if not left:
            break
    taken: dict[ExpertParallel, list[float]] = {
        way: [] for way, seconds in predicted.items() if seconds <= MOST_PREDICTED * least_s
    }
    for number in range(rounds + 1):
        for way, seconds in taken.items():
            seconds += [passed_s(module, ep, way, given)] * bool(number)
    ep.close()
    found = {way: statistics.median(seconds) for way, seconds in taken.items()}
    best = min(found, key=found.__getitem__)
    more = {name: found[way] / found[best] - 1 for name, way in (("sim", first), ("dict", ways.ways[ways.now]))}
    each = [
        f"\n{'':10} {1e3 * found[way]:7.1f} ms  predicted {1e3 * predicted[way]:7.1f} ms  {way_text(way)}"
        for way in sorted(found, key=found.__getitem__)
    ]
    return (
        f"{num_tokens:5} x {top_k}  {1e3 * found[best]:7.1f} ms  {way_text(best):26} {more['sim']:8.1%} "
        f"{more['dict']:10.1%}  {len(found):3}  predicted {1e3 * predicted[best]:.1f} ms; simulated: {way_text(first)}"
    ) + "".join([*each, f"\n{'':10} {links_text(links)}"] if shows_each else [])


def links_text(links: Links) -> str:
    """What was measured of the links, and what a prediction rests on."""
    lines = {level: line for (_, level), line in links.lines.items()}
    fits = [f"{level} {1e3 * line.alpha_s:.3g} ms + n / {1e-6 / line.beta_s:.4g} MB/s" for level, line in lines.items()]
    product = f"{1e-9 / links.product.beta_s:.3g} Gflop/s"
    return f"all-to-all {', '.join(fits)}; one more message {1e3 * links.message_s:.3g} ms; products {product}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="of a rank")
    parser.add_argument("--top-k", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--each", action="store_true", help="show every way, predicted and measured, and the links")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = Communicator(local_size=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())))
    if comm.rank == 0:
        print("tokens x experts, best fixed way, more than it: simulated, dictionary; ways measured", flush=True)
    for num_tokens, top_k in product(args.tokens, args.top_k):
        line = setting(num_tokens, top_k, args.rounds, comm, args.each)
        if comm.rank == 0:
            print(line, flush=True)
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
