"""Measures the ranks of a communicator, as a Machine."""

from __future__ import annotations

import math
import os
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from thinwire.calibration.links import probed, shared_rates
from thinwire.calibration.work import LONGEST_S, NUM_LEAST, Probe, probes, repeated
from thinwire.codecs.grammar import read
from thinwire.collectives import Communicator
from thinwire.collectives.patience import patience
from thinwire.cost import Cores, Machine
from thinwire.cost.graph import CARRY, ROUND
from thinwire.cost.machine import CPU, LEAST_LAUNCH_S, launch_of, starved
from thinwire.device import Device
from thinwire.errors import Problems, nearest
from thinwire.models.llama import PRESETS, LlamaConfig

LABEL_BYTES = 64
COMPUTE_TYPES = ("fp32", "bf16")
# What the strategies that a plan chooses from pack.
CODECS = (
    "fp32", "bf16", "int4/2048", "int8/64:bf16+hadamard32", "int4/64:bf16+hadamard32", "int8/128",
    "int8/128:bf16+hadamard32", "int8/64:nearest", "int4/64",
)  # fmt: skip
NUM_ROUNDS = 40
DISK_BYTES = 1 << 26


def calibrate(
    comm: Communicator,
    *,
    layers: Sequence[LlamaConfig] | None = None,
    dtypes: Sequence[str] = ("fp32",),
    codecs: Iterable[str] = CODECS,
    device: Device | None = None,
    folder: str | Path | None = None,
    longest_s: float = math.inf,
    say: Callable[[str], None] = lambda line: None,
) -> Machine:
    """Measure the ranks of a communicator and the links between them. A collective; all ranks get the same result.

    Work is timed on one rank of each machine while the others wait, then on all ranks at once, because ranks share
    cores. Links are measured in rounds of disjoint pairs, in both directions, then all at once.

    Args:
        layers: sizes of models, or of mixtures, of which one layer is timed; None: those of tiny, demo, 125m.
        dtypes: compute types, "fp32" or "bf16".
        codecs: the codecs to time, as text.
        folder: a folder on the disk whose speed is measured; None: no disk is measured.
        longest_s: seconds after which a kind of work is not timed again, once it was timed a few times; by default all
            are timed equally often.
        say: called with a line of progress, and with a warning if other programs keep the cores busy.

    Raises ConfigError, before anything is measured, with all that is wrong with the arguments; PeerLostError if a rank
    is missing.
    """
    codecs = list(codecs)
    check(layers, dtypes, codecs, folder, longest_s)
    device = device or Device()
    base = device.held_bytes()
    layers = layers or [
        replace(PRESETS[name], num_hidden_layers=1, vocab_size=256) for name in ("tiny", "demo", "125m")
    ]
    hosts, names, cores, num_local = _places(comm)
    memory = -_largest(comm, -device.memory_bytes(num_local))
    say("measuring links ...")
    network, scatter = probed(comm)
    share, carried = shared_rates(comm, network)
    say("measuring computing and packing, on one rank of each machine while the others wait ...")
    found = probes(layers, dtypes, codecs, device)
    is_first = hosts.index(hosts[comm.rank]) == comm.rank
    with patience().because(f"rank {hosts.index(hosts[comm.rank])} measures what this machine computes"):
        alone, counts, busy = _alone(comm, found, is_first, longest_s)
    # A GPU needs no core to compute.
    core_share = busy if device.kind == CPU else 1.0
    if told := starved(core_share):
        say(f"warning: {told}; measure again when they have ended")
    slowdown = _together(comm, found[0], float(alone[comm.rank, 0]))
    # Of each machine's first rank, for all of its ranks.
    own = torch.stack([alone[hosts.index(host)] for host in hosts])
    typical = own.quantile(0.5, dim=0)
    speeds = tuple(float(typical[0] / seconds) for seconds in own[:, 0])
    rates = {probe.kind: probe.amount / float(seconds) for probe, seconds in zip(found, typical, strict=True)}
    rates |= fitted({probe.kind: (probe.amount, float(seconds)) for probe, seconds in zip(found, typical, strict=True)})
    rates |= {ROUND: 1 / _round_s(comm)} | ({CARRY: carried} if comm.world_size > 1 else {})
    threads = torch.get_num_threads()
    made = Cores(hosts, cores)
    busiest = max(range(len(cores)), key=lambda host: hosts.count(host) / cores[host])
    base_slowdown = made.slowdown(busiest, threads * hosts.count(busiest))
    # Each GPU computes for one rank.
    is_shared = device.kind == CPU and threads * hosts.count(busiest) > 1
    contention = max(0.0, slowdown / base_slowdown - 1) if is_shared else 0.0
    return Machine(
        names, network, replace(made, contention=contention), rates, threads, share, speeds,
        memory_bytes=memory, base_bytes=_largest(comm, base), disk=_disk(comm, folder, is_first),
        measured_at=datetime.now().astimezone().isoformat(timespec="seconds"), device=device.name,
        scatter=scatter, repeats={probe.kind: num for probe, num in zip(found, counts, strict=True)},
        core_share=core_share,
    )  # fmt: skip


def check(
    layers: Sequence[LlamaConfig] | None, dtypes: Sequence[str], codecs: Sequence[str], folder: str | Path | None,
    longest_s: float,
) -> None:  # fmt: skip
    """Raise ConfigError with all that is wrong with the arguments of `calibrate`."""
    problems = Problems()
    if layers is not None and not layers:
        problems.messages.append("layers: none to time; nearest: None, which times those of tiny, demo and 125m")
    for layer in layers or ():
        if not isinstance(layer, LlamaConfig):
            near = (
                f"PRESETS[{layer!r}] of thinwire.models" if layer in PRESETS else "PRESETS['demo'] of thinwire.models"
            )
            problems.messages.append(f"layers: {layer!r} must be a LlamaConfig; nearest: {near}")
    problems.messages += wrong_dtypes("dtypes", dtypes)
    for text in codecs:
        problems.note(read, text)
    if folder is not None and not Path(folder).is_dir():
        problems.messages.append(f"folder {folder}: no such folder; nearest: '.'")
    # NaN is above nothing.
    if not longest_s > 0:
        problems.messages.append(f"longest_s {longest_s:g}: must be above 0; nearest: {LONGEST_S:g}")
    problems.raise_any()


def wrong_dtypes(asked: str, dtypes: Sequence[str]) -> list[str]:
    """What is wrong with compute types, a message each. asked: the argument, or the flag, that states them."""
    if not dtypes or isinstance(dtypes, str):
        return [f"{asked} {dtypes!r}: must be a list of one or more; nearest: {[dtypes or COMPUTE_TYPES[0]]}"]
    wrong = [name for name in dtypes if name not in COMPUTE_TYPES]
    return [f"{asked} {name}: must be fp32 or bf16{nearest(str(name), COMPUTE_TYPES)}" for name in wrong]


def fitted(layers: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Rates of layers and of their passes, from (operations, seconds) of a long pass, "layer ...", and a short one.

    A pass takes operations / rate + launch. The rate is the slope between the two passes, the launch is the remainder.
    """
    found = {}
    for layer, (long, long_s) in layers.items():
        if (kind := launch_of(layer)) != layer and kind in layers:
            short, short_s = layers[kind]
            # Noise must not make a pass free, nor its operations.
            rate = min((long - short) / max(long_s - short_s, 1e-9), 2 * long / long_s)
            found[layer] = max(rate, long / long_s)
            found[kind] = 1 / max(LEAST_LAUNCH_S, long_s - long / found[layer])
    return found


def _gathered(comm: Communicator, values: Sequence[float]) -> Tensor:
    """Every rank's values, fp64 [world_size, len(values)]."""
    return comm.wait(comm.all_gather_exact(torch.tensor(list(values), dtype=torch.float64)))


def _largest(comm: Communicator, value: float) -> float:
    return float(_gathered(comm, [value]).max())


def machine_mark() -> int:
    """A number that the processes of this machine share. Emulated nodes are one machine, told by its boot's number."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return zlib.crc32((boot.read_text() if boot.exists() else socket.gethostname()).encode())


def _places(comm: Communicator) -> tuple[tuple[int, ...], tuple[str, ...], tuple[float, ...], int]:
    """Number and name of each rank's machine, cores of each machine, and the number of ranks on this one."""
    mark = machine_mark()
    num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = _gathered(comm, [mark, num]).tolist()
    marks = [row[0] for row in told]
    machines = list(dict.fromkeys(marks))
    hosts = tuple(machines.index(each) for each in marks)
    cores = tuple(max(row[1] for row in told if row[0] == each) for each in machines)
    label = socket.gethostname().encode()[:LABEL_BYTES].ljust(LABEL_BYTES, b"\0")
    labels = comm.wait(comm.all_gather_exact(torch.frombuffer(bytearray(label), dtype=torch.uint8)))
    names = tuple(bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in labels)
    return hosts, names, cores, marks.count(mark)


def _alone(
    comm: Communicator, found: Sequence[Probe], is_first: bool, longest_s: float
) -> tuple[Tensor, list[int], float]:
    """Seconds of each probe on the first rank of each machine, fp64 [world_size, probes]; zeros for the other ranks.

    Also the number of repeats of each, the fewest of any machine, and the smallest share of that time in which such a
    rank had a core.
    """
    comm.barrier()
    start, start_cpu_s = time.perf_counter(), time.process_time()
    runs = [repeated(probe.run, longest_s) for probe in found] if is_first else []
    busy = (time.process_time() - start_cpu_s) / (time.perf_counter() - start) if is_first else 1.0
    own = [median(each) for each in runs] or [0.0] * len(found)
    counts = _gathered(comm, [len(each) for each in runs] or [math.inf] * len(found)).amin(0)
    return _gathered(comm, own), [int(num) for num in counts.tolist()], float(_gathered(comm, [busy]).min())


def _together(comm: Communicator, probe: Probe, alone_s: float) -> float:
    """How much longer a piece of work takes while all ranks do it than alone, as a factor; the median over ranks."""
    alone_s = _largest(comm, alone_s)
    probe.run()
    comm.barrier()
    seconds: list[float] = []
    due = time.perf_counter() + max(0.5, 2 * NUM_LEAST * alone_s)
    while time.perf_counter() < due or len(seconds) < NUM_LEAST:
        start = time.perf_counter()
        probe.run()
        seconds.append(time.perf_counter() - start)
    mean_s = sum(seconds) / len(seconds)
    return float(_gathered(comm, [mean_s]).median()) / max(alone_s, 1e-9)


def _round_s(comm: Communicator) -> float:
    """CPU seconds that a round of short messages takes."""
    comm.barrier()
    start = time.process_time()
    for _ in range(NUM_ROUNDS):
        comm.wait(comm.all_gather_exact(torch.zeros(1)))
    return max(1e-6, float(_gathered(comm, [(time.process_time() - start) / NUM_ROUNDS]).median()))


def _disk(comm: Communicator, folder: str | Path | None, is_first: bool) -> tuple[float, float]:
    """Bytes per second of writing to a disk, synced, and of reading again, on the slowest machine."""
    own = (math.inf, math.inf)
    if folder is not None and is_first:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            data = os.urandom(1 << 20)
            start = time.perf_counter()
            for _ in range(DISK_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            written_s = time.perf_counter() - start
            if hasattr(os, "posix_fadvise"):
                # What is read must come from the disk.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = time.perf_counter()
            while file.read(1 << 20):
                pass
            own = DISK_BYTES / written_s, DISK_BYTES / (time.perf_counter() - start)
    written, read = _gathered(comm, own).min(0).values.tolist()
    return written, read
