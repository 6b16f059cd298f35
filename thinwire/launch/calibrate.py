"""`thinwire calibrate`: measure machines and the links between them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from thinwire.cost import Machine
from thinwire.cost.graph import ROUND
from thinwire.cost.machine import LAYER, LEAST_LAUNCH_S, MIXTURE, launch_of
from thinwire.errors import Problems, ThinwireError, nearest
from thinwire.flags import CommandLine, is_plain
from thinwire.models.presets import NAMES as PRESETS

# Of rates, by the first word of their kind.
UNITS = dict.fromkeys((LAYER, MIXTURE), "GFLOP/s")
LAUNCHES = tuple(launch_of(f"{layer} ").strip() for layer in (LAYER, MIXTURE))
UNITS |= dict.fromkeys((*LAUNCHES, ROUND), "thousand/s")
# Of products, as torch calls them.
DTYPES = ("float32", "bfloat16")
# Options that are checked without torch, for which nobody who misspells a flag waits.
PLAIN = ("out", "models", "disk", "kernels", "workers", "nodes", "node", "timeout")
# A probe has this long for its 20 repeats: nobody waits to train.
PATIENT_S = 10.0


@dataclass(frozen=True)
class CalibrateConfig:
    """Measure what machines compute, pack and send, for `thinwire plan`.

    Machines join as for `thinwire train`, or run the command in `thinwire lab`.
    """

    out: str = "machine.json"
    """File to write, on node 0."""
    models: tuple[str, ...] = ("tiny", "demo", "125m")
    """Presets, such as tiny or, of a mixture, moe-demo; one layer of each is timed, and a plan takes the preset of the
    nearest width."""
    dtypes: tuple[str, ...] = ("fp32",)
    """Compute types to time: fp32, bf16 or both."""
    codecs: tuple[str, ...] = ()
    """Codecs to time beside those of the strategies that `thinwire plan` chooses from."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What is measured, as for `thinwire train`: cuda, a GPU for each worker, or cpu; auto takes cuda where there is a
    GPU for every worker."""
    disk: str | None = None
    """Folder on the disk to measure too, with a file of 64 MB."""
    kernels: bool = False
    """Also measure products of matrices by type and shape, with random values and with zeros, and the latency of each
    cache of the processor, on rank 0."""
    workers: int = 1
    """Worker processes on this machine."""
    local_size: int | None = None
    """Ranks that share a fast link, as for `thinwire train`."""
    join: str | None = None
    """HOST:PORT of node 0, with several machines; give the same value on all of them."""
    nodes: int = 1
    """Number of machines, with --join."""
    node: int = 0
    """This machine's number, from 0, with --join."""
    timeout: float = 300.0
    """Seconds after which a silent rank counts as lost."""


def calibrate_line() -> CommandLine:
    """The flags of `thinwire calibrate`."""
    return CommandLine("thinwire calibrate", CalibrateConfig)


def run_calibrate(args: Sequence[str]) -> int:
    """Measure as one rank, or start the ranks of this machine. Raises ConfigError with all errors at once."""
    problems = Problems()
    stated = calibrate_line().read(args, problems)
    config = CalibrateConfig(**stated[""])
    check_plain(config, problems)
    if not is_plain(stated, PLAIN):
        check(config, problems)
    problems.raise_any()
    return measure(config) if "RANK" in os.environ else start_ranks(config, args)


def check_plain(config: CalibrateConfig, problems: Problems) -> None:
    """Note what can't work, as far as that is known without torch."""
    from thinwire.planner.outputs import unwritable

    problems.messages += wrong_ranks(config)
    if not config.models:
        problems.messages.append("--models is empty: name at least one; nearest: --models demo")
    for name in config.models:
        if name not in PRESETS:
            problems.messages.append(f"--models {name}: no such preset{nearest(name, PRESETS)}")
    if config.disk is not None and not Path(config.disk).is_dir():
        problems.messages.append(f"--disk {config.disk}: no such folder; nearest: --disk .")
    problems.messages += unwritable("--out", Path(config.out), CalibrateConfig.out)


def wrong_ranks(config: CalibrateConfig) -> list[str]:
    """What is wrong with the numbers of machines and ranks, a message each."""
    from thinwire.run.config import node_errors, number_errors

    return [*number_errors(config), *node_errors(config.nodes, config.node, config.join)]


def check(config: CalibrateConfig, problems: Problems) -> None:
    """Note what else can't work."""
    from thinwire.calibration.machine import wrong_dtypes
    from thinwire.codecs.grammar import read
    from thinwire.collectives import Topology
    from thinwire.device import choose
    from thinwire.launch.machine import check_join

    problems.note(choose, config.device, int(os.environ.get("LOCAL_WORLD_SIZE", config.workers)))
    if "RANK" not in os.environ:
        # Of a rank that torchrun has started, node 0 listens already.
        problems.note(check_join, config.join, config.node)
    if config.local_size is not None and not wrong_ranks(config):
        world_size = int(os.environ.get("WORLD_SIZE", config.nodes * config.workers))
        problems.note(Topology.stated, world_size, config.local_size)
    problems.messages += wrong_dtypes("--dtypes", config.dtypes)
    for text in config.codecs:
        problems.note(read, text)


def start_ranks(config: CalibrateConfig, args: Sequence[str]) -> int:
    """Start this machine's ranks with torchrun; each of them runs the command again."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from thinwire.launch.agent import LOOPBACK
    from thinwire.launch.machine import free_port, threads_per_worker
    from thinwire.launch.train import choose_interface

    host, port = (config.join or f"{LOOPBACK}:{free_port()}").rsplit(":", 1)
    choose_interface(host, config.nodes)
    os.environ["OMP_NUM_THREADS"] = str(threads_per_worker(config.workers)[0])
    grid: dict[str, object] = {"nproc-per-node": config.workers, "nnodes": config.nodes, "node-rank": config.node}
    grid |= {"master-addr": host, "master-port": port}
    words = [f"--{name}={value}" for name, value in grid.items()]
    try:
        own = parse_args([*words, "-m", "thinwire"])
        # Not parsed: torchrun would take --node for a short form of two flags of its own.
        own.training_script_args = ["calibrate", *args]
        run(own)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise ThinwireError(f"rank {rank} ended with exit code {failure.exitcode}; its message is above") from None
    return 0


def measure(config: CalibrateConfig) -> int:
    """Measure as one rank. The first rank writes the file."""
    from dataclasses import replace
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    # A worker has it all, and its memory is counted from there.
    import thinwire.launch.preload  # noqa: F401
    from thinwire.calibration import calibrate
    from thinwire.calibration.machine import CODECS
    from thinwire.calibration.reach import all_on_this_machine
    from thinwire.collectives import Communicator
    from thinwire.device import choose, take
    from thinwire.launch.machine import threads_per_worker
    from thinwire.models import PRESETS as SIZES

    num_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads, why = threads_per_worker(num_workers)
    torch.set_num_threads(threads)
    kind, why_device = choose(config.device, num_workers)
    device = take(kind, int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=config.timeout)
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    ranks, lines = reached_ranks(config, store, rank, world_size)
    if rank == 0:
        shown = f"--device {config.device}: {device.name}" + (f" ({why_device})" if why_device else "")
        print(f"threads per rank: {threads} ({why})", shown, *lines, sep="\n", flush=True)
    if rank not in ranks:
        return 0
    own = dist.PrefixStore("thinwire/calibrate", store)
    dist.init_process_group("gloo", store=own, rank=ranks.index(rank), world_size=len(ranks), timeout=timeout)
    comm = Communicator(local_size=config.local_size, timeout_s=config.timeout)
    machine = calibrate(
        comm, layers=[replace(SIZES[name], num_hidden_layers=1, vocab_size=257) for name in config.models],
        dtypes=config.dtypes, codecs=dict.fromkeys((*CODECS, *config.codecs)), device=device, folder=config.disk,
        longest_s=PATIENT_S, say=lambda what: print(what, flush=True) if comm.rank == 0 else None,
    )  # fmt: skip
    if comm.rank == 0:
        told: list[str] = []
        if config.kernels:
            print("measuring products and caches ...", flush=True)
            machine, told = with_kernels(machine, device)
        Path(config.out).write_text(machine.to_json())
        print(*lines_on(machine), *told, *lines, sep="\n")
        if all_on_this_machine(comm.world_size):
            print("links are this machine's loopback, no network: plan for other machines with theirs")
        print(f"written to {config.out}")
    comm.barrier()
    sys.stdout.flush()
    # gloo's threads may still wait for peers that have left.
    os._exit(0)


def reached_ranks(config: CalibrateConfig, store: Any, rank: int, world_size: int) -> tuple[list[int], list[str]]:
    """The ranks that are measured, and lines about broken links. A collective."""
    from thinwire.calibration.reach import all_connected
    from thinwire.launch.reached import broken_links

    down, lines = broken_links(store, rank, world_size)
    local = config.local_size or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ranks = all_connected(down, [each // local for each in range(world_size)])
    if len(ranks) < world_size:
        out = ", ".join(str(each) for each in range(world_size) if each not in ranks)
        lines.append(
            f"rank {out} is left out, because training connects all ranks; the file has the other {len(ranks)}"
        )
    return ranks, lines


def with_kernels(machine: Machine, device: Any) -> tuple[Machine, list[str]]:
    """The machine with what products on a device and caches of the processor take, and lines about them."""
    from dataclasses import astuple, replace

    from thinwire.calibration.kernels import CACHE_BYTES, cached_bytes, fall_of, latencies_ns, products, rooflines

    found, caches = list(products(DTYPES, device)), latencies_ns()
    cached = cached_bytes(caches) if device.kind == "cpu" else CACHE_BYTES
    fits, pairs = rooflines(found, cached), list(zip(found[::2], found[1::2], strict=True))
    rates = {own.name: (own.operations / own.seconds, own.operations / zeros.seconds) for own, zeros in pairs}
    best = {dtype: max(rate for name, (rate, _) in rates.items() if name.startswith(dtype)) for dtype in DTYPES}
    lines = [f"{'product':<28} {'random':>14} {'zeros':>14}   GFLOP/s"]
    lines += [f"  {name:<26} {random / 1e9:>14.4g} {zeros / 1e9:>14.4g}" for name, (random, zeros) in rates.items()]
    for name, fit in fits.items():
        launch = f" + {1e6 * fit.launch_s:.3g} us" if fit.launch_s else ", launch not seen"
        lines.append(
            f"  {name}: max(operations / {fit.flops / 1e9:.4g} G, bytes / {fit.rate / 1e9:.4g} G){launch}; "
            f"{fit.flops / best[name.split()[0]]:.0%} of the best product's operations, "
            f"{fit.rate / machine.rates['copy']:.0%} of a copy's bytes"
        )
    lines.append("a load of the processor: " + ", ".join(f"{size >> 10} KiB {ns:.3g} ns" for size, ns in caches))
    lines.append(f"  from one size to the next it is never faster by more than {fall_of(caches):.0%}")
    kernels = {name: astuple(fit) for name, fit in fits.items()}
    return replace(machine, kernels=kernels, products=rates, latencies_ns=tuple(caches)), lines


def lines_on(machine: Machine) -> list[str]:
    """The measurements as lines of text."""
    lines = links_on(machine) if machine.num_ranks > 1 else []
    for kind, rate in machine.rates.items():
        unit = UNITS.get(kind.split()[0], "MB/s")
        shown = rate / {"GFLOP/s": 1e9, "thousand/s": 1e3, "MB/s": 1e6}[unit]
        is_unseen = kind.split()[0] in LAUNCHES and rate >= 1 / LEAST_LAUNCH_S
        lines.append(f"  {kind:<36} " + ("  not seen" if is_unseen else f"{shown:>10.4g} {unit}"))
    cores = ", ".join(f"{num:g}" for num in machine.cores.num)
    lines.append(f"cores {cores}; work is {machine.cores.contention:.0%} slower where all of them are busy")
    written, read = machine.disk
    if written < math.inf:
        lines.append(f"disk: {written / 1e6:.4g} MB/s written, {read / 1e6:.4g} MB/s read, of the slowest machine")
    return lines


def links_on(machine: Machine) -> list[str]:
    """What was measured of links between ranks, as lines of text: two tables, and sentences."""
    network, ranks, lines = machine.network, range(machine.num_ranks), list[str]()
    for what, factor, table in (("Mbit/s", 8e-6, network.rates), ("ms of delay", 1e3, network.delays_s)):
        lines.append(f"{what} from (row) to (column):")
        for a in ranks:
            cells = ["-" if a == b else f"{factor * table[a][b]:.3g}" for b in ranks]
            lines.append(f"  {a:>3} " + " ".join(f"{cell:>8}" for cell in cells))
    if machine.scatter:
        spread = {pair: machine.scatter[pair[0]][pair[1]] for pair in network.pairs}
        a, b = max(spread, key=spread.__getitem__)
        lines.append(
            f"two probes of a link differ by {median(spread.values()):.0%} in the median, at most by "
            f"{spread[a, b]:.0%}, from {a} to {b}"
        )
    lines.append(f"bursts {network.burst_s:.2g} s; all at once: {machine.share:.0%} of a fair share of the link")
    return lines
