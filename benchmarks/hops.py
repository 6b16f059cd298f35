"""A layer of experts by thinwire's codecs beside transformers' own `AllToAllEP`, on the ranks of a slow network.

    thinwire lab --nodes 4 --rate 100mbit -- python benchmarks/hops.py
    torchrun --nproc-per-node 4 benchmarks/hops.py

One layer, forward and backward, top-2 of 8 experts, each rank with tokens of its own. `AllToAllEP` runs in fp32, in
bf16, and with rows of bf16 whose products are of fp32; thinwire with rows of fp32, and with `int8` for all four hops,
whose products are of fp32 or of bf16, as their rivals' are. On cores with instructions for bf16 such products are more
than twice as fast, which no hop can make up for: a ratio of hops is one between equal products. They take turns; the
medians count. Needs transformers 5.23.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig
from transformers.distributed.expert_parallel import AllToAllEP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from thinwire import ExpertParallel, expert_parallel
from thinwire.hosts.experts import ExpertRanks
from thinwire.models.moe import Experts, MoEConfig

EXPERTS, TOP_K = 8, 2
# Dtypes of rows, and of products.
THEIRS = {
    "fp32": (torch.float32, torch.float32), "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16 rows, fp32 products": (torch.bfloat16, torch.float32),
}  # fmt: skip
# The codec of hops, the dtype of products, and chunks.
OURS: dict[str, tuple[str, torch.dtype, int]] = {
    "fp32": ("fp32", torch.float32, 1), "int8": ("int8", torch.float32, 1),
    "int8, 2 chunks": ("int8", torch.float32, 2), "int8, bf16 products": ("int8", torch.bfloat16, 1),
}  # fmt: skip
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
Spread = tuple[Layer, ExpertRanks]


def theirs(hidden: int, inner: int, rows: torch.dtype, products: torch.dtype) -> Layer:
    """The layer by transformers: this rank's experts, with the dtypes of rows on their way, and of products."""
    ranks = dist.get_world_size()
    config = MixtralConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=EXPERTS // ranks)
    config._experts_implementation = "grouped_mm"
    experts = MixtralExperts(config).to(products)
    for param in experts.parameters():
        torch.nn.init.normal_(param, std=0.02)
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("tp", "ep"))
    layer = AllToAllEP(experts, mesh["ep"], mesh["tp"])
    work = layer.experts_forward
    layer.experts_forward = lambda x, index, weights: work(x.to(products), index, weights.to(products)).to(rows)
    return lambda x, index, weights: layer(x.to(rows), index, weights.to(rows)).float()


def ours(hidden: int, inner: int, codec: str, products: torch.dtype, chunks: int, local_size: int) -> Spread:
    """The layer by thinwire, with a codec for all hops, the dtype of products, and rows in so many chunks."""
    model = torch.nn.Module()
    config = MoEConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=EXPERTS)
    model.experts = module = Experts(config).to(products)
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.02)
    options = ExpertParallel(dist.get_world_size(), chunks=chunks, dispatch=codec, combine=codec, gradients=codec)
    ep = expert_parallel(model, options, local_size=local_size)
    return lambda x, index, weights: module(x.to(products), index, weights.to(products)).float(), ep


def passed_s(layer: Layer, given: tuple[Tensor, Tensor, Tensor]) -> float:
    """Seconds of a forward and backward, until all ranks are done."""
    dist.barrier()
    start = time.perf_counter()
    layer(given[0].clone().requires_grad_(), *given[1:]).sum().backward()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes, local_size = (args.hidden, args.inner), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    own = {
        f"thinwire, {name}": ours(*sizes, codec, products, chunks, local_size)
        for name, (codec, products, chunks) in OURS.items()
    }
    layers: dict[str, Layer] = {
        **{f"AllToAllEP, {name}": theirs(*sizes, *dtypes) for name, dtypes in THEIRS.items()},
        **{name: layer for name, (layer, _) in own.items()},
    }
    draw = torch.Generator().manual_seed(dist.get_rank())
    index = torch.rand(args.tokens, EXPERTS, generator=draw).topk(TOP_K, -1).indices
    given = torch.randn(args.tokens, args.hidden, generator=draw), index, torch.full((args.tokens, TOP_K), 1 / TOP_K)
    taken: dict[str, list[float]] = {name: [] for name in layers}
    for number in range(args.rounds + 1):
        for name, layer in layers.items():
            taken[name] += [passed_s(layer, given)] * bool(number)
    found = {name: statistics.median(each) for name, each in taken.items()}
    for _, ep in own.values():
        ep.close()
    if dist.get_rank() == 0:
        for name, median_s in found.items():
            over = "  ".join(f"{found[f'AllToAllEP, {rows}'] / median_s:5.2f} x" for rows in THEIRS)
            print(f"{name:31} {1e3 * median_s:8.1f} ms  {over}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
