"""The goals of long sequences and of mixtures of experts, each beside what is measured here.

    python benchmarks/sequence_experts.py
    python benchmarks/sequence_experts.py --layer --memory --once --prune

A flag for each goal; without any, all of them. `--layer`, `--memory`, `--once` and `--prune` run in this process, on
one thread, and take processor seconds. `--attention`, `--hops` and `--auto` run sequence.py, hops.py and ways.py, in
the lab where a network is meant; it needs Linux that permits network namespaces. On a machine that does something else
their seconds say little. `--loss` trains with rounded hops by loss.py. It takes hours, but keeps what has finished in
--runs: call it again, and it goes on.

Whatever takes longer than --minutes is broken off, and the goal said to be not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from thinwire.data import load_tokenizer
from thinwire.methods.experts import ExpertParallel, ExpertPlacement, Rows, sent
from thinwire.models import build_model
from thinwire.models.moe import Experts, MoEConfig, Order
from thinwire.pruning.prune import prune
from thinwire.run.config import TrainConfig
from thinwire.run.run import tokens_of

HERE = Path(__file__).parent
HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 256, 512, 8, 2, 1024
# What `loss` varies: codecs of rows, there and back, and of their gradients; and the loss that they may cost.
# The last has 4.875 bits a number in the mean.
HOPS = {
    "fp32": ("fp32", "fp32", 0.0),
    "int8": ("int8", "int8", 0.01),
    "int4": ("int4/16:bf16:nearest", "int4", 0.02),
    "int6-int3": ("int6/64:bf16:nearest", "int3/32:bf16", 0.02),
}


@dataclass(frozen=True)
class Goal:
    """What is asked, at least or at most, and what was measured; None: it took too long."""

    name: str
    sign: str
    asked: float
    measured: float | None

    def __str__(self) -> str:
        if self.measured is None:
            return f"{self.name:72} {self.sign} {self.asked:5g}         -  not measured"
        holds = self.measured >= self.asked if self.sign == ">=" else self.measured <= self.asked
        return f"{self.name:72} {self.sign} {self.asked:5g} {self.measured:9.3f}  {'holds' if holds else 'NOT REACHED'}"


@dataclass(frozen=True)
class Bench:
    """How long another program may run, and where finished runs of `loss` are kept."""

    limit_s: float
    runs: Path
    seeds: int
    steps: int

    def told(self, *command: str) -> str:
        """What a program prints; empty if it takes too long. It and all that it started are then ended."""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                told, _ = process.communicate(timeout=self.limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                return ""
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
        return told

    def lab(self, nodes: int, local_size: int, script: str, *flags: str, rate: str = "100mbit") -> str:
        """The same of a script on the ranks of the lab."""
        network = ["--nodes", str(nodes), "--local-size", str(local_size), "--rate", rate]
        thinwire = [sys.executable, "-m", "thinwire", "lab", *network, "--"]
        return self.told(*thinwire, sys.executable, str(HERE / script), *flags)


def times(told: str, name: str, column: int = 0) -> float | None:
    """The ratio, printed as "2.50 x", in the line of a name; None: there is no such line."""
    line = next((line for line in told.splitlines() if f"{name} " in line), None)
    return None if line is None else float(re.findall(r"([\d.]+) x", line)[column])


def attention(bench: Bench) -> Iterator[Goal]:
    """Beside DeepSpeed's arithmetic, written in sequence.py, on loopback and on two nodes."""
    script = str(HERE / "sequence.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    near = bench.told(*torchrun, script, "--kv-heads", "16")
    yield Goal("attention, exact, loopback: times DeepSpeed's arithmetic", ">=", 1.0, times(near, "ulysses, fp32"))
    even = bench.lab(2, 1, "sequence.py", "--kv-heads", "16")
    yield Goal("attention, bf16, 2 nodes: times DeepSpeed's arithmetic", ">=", 1.8, times(even, "ulysses, bf16"))
    grouped = bench.lab(2, 1, "sequence.py", "--heads", "16", "--kv-heads", "2")
    name = "attention, exact ring, 8:1 heads, 2 nodes: times DeepSpeed's arithmetic"
    yield Goal(name, ">=", 2.5, times(grouped, "ring, fp32"))


def processor_s(run: Callable[[], Any]) -> float:
    """Seconds of this thread's processor, which others on the machine change less than those of the clock."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def layer(_: Bench) -> Iterator[Goal]:
    """One layer's experts, forward and backward, beside those of transformers. They take turns; medians count."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    modules: dict[str, Any] = {"thinwire": Experts(MoEConfig(**sizes))}
    for name in ("grouped_mm", "eager"):
        modules[name] = MixtralExperts(config := MixtralConfig(**sizes))
        config._experts_implementation = name
    x, index, weights = torch.randn(TOKENS, HIDDEN), *torch.rand(TOKENS, EXPERTS).topk(TOP_K, -1)[::-1]

    def run(module: Any) -> None:
        module(x.clone().requires_grad_(), index, weights).square().sum().backward()

    taken: dict[str, list[float]] = {name: [] for name in modules}
    for module in modules.values():
        for param in module.parameters():
            torch.nn.init.normal_(param, std=0.02)
    for number in range(16):
        for name, module in modules.items():
            taken[name] += [processor_s(partial(run, module))] * bool(number)
    found = {name: statistics.median(each) for name, each in taken.items()}
    for name, asked in (("grouped_mm", 1.0), ("eager", 1.5)):
        yield Goal(f"layer of experts: times transformers' {name}", ">=", asked, found[name] / found["thinwire"])


def held_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes of all tensors that a forward keeps for its backward, and of its result; each storage once."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        pack(run())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def memory(_: Bench) -> Iterator[Goal]:
    """Rows to experts and back beside GShard's einsum with one-hot places."""
    x, weights = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, TOP_K, requires_grad=True)
    index = torch.rand(TOKENS, EXPERTS).topk(TOP_K, -1).indices
    order = Order.of(index, EXPERTS)
    most, starts = int(order.counts.max()), order.counts.cumsum(0) - order.counts
    places = torch.empty(TOKENS * TOP_K, dtype=torch.int64)
    places[order.choices] = torch.arange(TOKENS * TOP_K) - starts.repeat_interleave(order.counts)

    def sparse() -> Tensor:
        rows = order.encode(x) * 1.0
        return order.decode(rows * weights.flatten()[order.choices, None], TOKENS)

    def einsum() -> Tensor:
        hits = F.one_hot(index, EXPERTS).float()[..., None] * F.one_hot(places.view(TOKENS, TOP_K), most)[:, :, None]
        gates = torch.einsum("tk,tkec->tec", weights, hits)
        rows = torch.einsum("tec,th->ech", hits.sum(1), x)
        return torch.einsum("tec,ech->th", gates, rows * 1.0)

    assert torch.allclose(sparse(), einsum(), atol=1e-5)
    yield Goal("encode and decode: memory over the einsum's", "<=", 0.3, held_bytes(sparse) / held_bytes(einsum))


def once(_: Bench) -> Iterator[Goal]:
    """Bytes between nodes of rows that enter a node once, 2 x 2 ranks, 8 experts, 4 of each token."""
    ranks, nodes, top_k, placement = 4, 2, 4, ExpertPlacement(EXPERTS, 4)
    index = torch.rand(ranks, TOKENS, EXPERTS).topk(top_k, -1).indices
    counts = [torch.bincount(each.flatten(), minlength=EXPERTS).tolist() for each in index]
    entering = [[int((each // (EXPERTS // nodes) == node).any(1).sum()) for node in range(nodes)] for each in index]
    ways = ExpertParallel(ranks, route="linear"), ExpertParallel(ranks, route="once")
    # The weights of a token's experts go with its row, and weigh less beside a wider one.
    for width in (HIDDEN, 4 * HIDDEN):
        rows = Rows(counts, width, torch.float32, entering, top_k)
        linear, once = (
            sum(num_bytes for (a, b), num_bytes in sent(placement, rows, way, 0, 2).items() if a // 2 != b // 2)
            for way in ways
        )
        yield Goal(f"route once, rows of {width}: bytes between nodes over linear's", "<=", 0.5, once / linear)


def hops(bench: Bench) -> Iterator[Goal]:
    """Layers of experts in int8 beside transformers' AllToAllEP, on four nodes; products of both in the same dtype."""
    told = bench.lab(4, 1, "hops.py")
    rivals = (("fp32", 3.0, "int8"), ("bf16", 1.6, "int8, bf16 products"), ("bf16, fp32 products", 1.6, "int8"))
    for column, (rows, asked, own) in enumerate(rivals):
        found = times(told, f"thinwire, {own}", column)
        yield Goal(f"int8 hops, 4 nodes: times AllToAllEP in {rows}", ">=", asked, found)


def auto(bench: Bench) -> Iterator[Goal]:
    """By rate, how many of four settings `auto` takes at most 5% more than the best fixed way in."""
    for rate in ("20mbit", "100mbit", "1gbit"):
        lines = [line for line in bench.lab(2, 2, "ways.py", rate=rate).splitlines() if "%" in line]
        more = [float(re.findall(r"(-?[\d.]+)%", line)[1]) for line in lines]
        near = sum(each <= 5 for each in more) if more else None
        yield Goal(f"auto within 5% of the best fixed way, settings of 4 at {rate}", ">=", 4, near)


@torch.enable_grad()
def trained(seed: int, steps: int) -> tuple[Any, Tensor]:
    """A small mixture after some steps on the text of Python's library, and 288 held-out sequences."""
    tokens = torch.from_numpy(tokens_of(TrainConfig(), load_tokenizer("bytes")).tokens[: 4 << 20].astype("int64"))
    model, draw = build_model("moe-tiny", vocab_size=256, seq_len=128, seed=seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    held, span = len(tokens) - (1 << 18), torch.arange(129)
    for _ in range(steps):
        text = tokens[torch.randint(held - 129, (8, 1), generator=draw) + span]
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokens[held:][: 288 * 129].view(288, 129)


def of_experts(model: Any, tokens: Tensor) -> list[tuple[Any, tuple[Tensor, ...], Tensor]]:
    """The experts of each layer, what a forward gives them, and the weighted sums that they return."""
    found: list[tuple[Any, tuple[Tensor, ...], Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda *called: found.append(called))
        for module in model.modules()
        if isinstance(module, Experts)
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return found


@dataclass(frozen=True)
class PrunedLosses:
    """Of a model of which 70% were pruned, by method: the held-out loss, and the error of its experts' weighted sums.

    errors: squares over those of the sums, for the inputs of the whole model. passes: seconds of one pruning over those
    of a forward.
    """

    losses: dict[str, float]
    errors: dict[str, float]
    passes: float


@torch.no_grad()
def pruned(seed: int, steps: int) -> PrunedLosses:
    """What each method costs a model that was trained for some steps."""
    model, text = trained(seed, steps)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = of_experts(model, text[:32, :-1])
    size = sum(float(sums.square().sum()) for _, _, sums in wanted)
    batches, losses, errors, prune_s = text[32:, :-1].split(8), dict[str, float](), dict[str, float](), list[float]()
    for method in ("moe-pruner", "wanda", "magnitude", "random"):
        model.load_state_dict(weights)
        prune_s.append(processor_s(partial(prune, model, batches, sparsity=0.7, method=method)))
        losses[method] = float(model(text[:32, :-1], text[:32, 1:]))
        errors[method] = sum(float((module(*given) - sums).square().sum()) for module, given, sums in wanted) / size
    forward_s = statistics.median(processor_s(lambda: [model(tokens) for tokens in batches]) for _ in range(5))
    return PrunedLosses(losses, errors, prune_s[0] / forward_s)


def prune_goals(bench: Bench) -> Iterator[Goal]:
    """Mean errors of the experts' outputs and mean losses over seeds, each method over the next worse one."""
    until, every = time.monotonic() + bench.limit_s, list[PrunedLosses]()
    while len(every) < bench.seeds and time.monotonic() < until:
        every.append(pruned(len(every), bench.steps))
    for what in ("errors", "losses"):
        found = [getattr(each, what) for each in every]
        means = {method: statistics.mean(by[method] for by in found) for method in found[0]}
        for better, worse in pairwise(means):
            name = f"pruned by 70%, {len(every)} seeds: {what}, {better} over {worse}"
            yield Goal(name, "<=", 1.0, means[better] / means[worse])
    passes = statistics.median(each.passes for each in every)
    yield Goal("pruning: forward passes that its processor seconds would make", "<=", 3.0, passes)


def loss(bench: Bench) -> Iterator[Goal]:
    """Held-out losses of rounded hops over those of exact ones, by seed, and the scatter of exact runs."""
    contestants = [
        f"{name}-hops=zero[experts.parallel=4,experts.dispatch={rows},experts.combine={rows},"
        f"experts.gradients={gradients}]"
        for name, (rows, gradients, _) in HOPS.items()
    ]
    seeds = list(map(str, range(bench.seeds)))
    flags = f"--model moe-tiny --seq-len 64 --micro-batch 2 --dtype fp32 --lr 3e-3 --steps {2 * bench.steps}"
    bench.told(
        sys.executable, str(HERE / "loss.py"), "--runs", str(bench.runs), "--strategies",
        ",".join(contestants), "--seeds", *seeds, "--flags", *flags.split(),
    )  # fmt: skip
    found: dict[str, dict[int, float]] = {name: {} for name in HOPS}
    for line in map(json.loads, bench.runs.read_text().splitlines() if bench.runs.exists() else []):
        config = tomllib.loads(line["config"])
        stated = tuple(config["experts"].get(way, "fp32") for way in ("dispatch", "combine", "gradients"))
        for name, (rows, gradients, _) in HOPS.items():
            if config["steps"] == 2 * bench.steps and stated == (rows, rows, gradients):
                found[name][config["seed"]] = line["heldout_loss"]
    exact = found["fp32"]
    if len(exact) > 1:
        scatter = statistics.stdev(exact.values()) / statistics.mean(exact.values())
        print(f"exact hops, {len(exact)} seeds: losses scatter by {scatter:.2%}, their standard deviation")
    for name in list(HOPS)[1:]:
        more = [found[name][seed] / exact[seed] - 1 for seed in found[name].keys() & exact.keys()]
        goal = f"{name} hops, {len(more)} seeds: held-out loss more than exact hops'"
        yield Goal(goal, "<=", HOPS[name][2], statistics.mean(more) if more else None)


GOALS: dict[str, Callable[[Bench], Iterator[Goal]]] = {
    "attention": attention, "layer": layer, "memory": memory, "hops": hops, "once": once, "auto": auto,
    "prune": prune_goals, "loss": loss,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, measure in GOALS.items():
        parser.add_argument(
            f"--{name}", action="store_true", help=(measure.__doc__ or "").splitlines()[0].replace("%", "%%")
        )
    parser.add_argument("--seeds", type=int, default=5, help="of --prune and --loss")
    parser.add_argument("--steps", type=int, default=1000, help="of models that are pruned; --loss takes twice as many")
    parser.add_argument("--minutes", type=float, default=30, help="of each program, or of --prune, at most")
    parser.add_argument("--runs", type=Path, default=HERE / "results/hops.jsonl", help="finished runs of --loss")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bench = Bench(60 * args.minutes, args.runs, args.seeds, args.steps)
    asked = [name for name in GOALS if getattr(args, name)]
    print(f"{'goal':72} {'asked':>8} {'measured':>9}")
    for name in asked or GOALS:
        for goal in GOALS[name](bench):
            print(goal, flush=True)


if __name__ == "__main__":
    main()
