"""`thinwire lab`: runs a command on every node of an emulated slow network, or measures its links."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import tyro

from thinwire.errors import ConfigError, Problems
from thinwire.flags import LAB, CommandLine
from thinwire.lab.check import TOLERANCE, Reading, check
from thinwire.lab.network import Counters, LabError, LabNetwork, check_requirements
from thinwire.lab.run import GRACE_S, Job, check_command, shell_code, start, threads_per_rank
from thinwire.lab.spec import LabSpec, optional, parse_link, parse_slow

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class LabOptions:
    """Run a command on every node of an emulated slow network: thinwire lab [OPTIONS] -- COMMAND.

    Nodes are network namespaces of this machine, their links are shaped by the kernel. The command finds torchrun's
    variables and runs once per rank.
    """

    nodes: int = 4
    """Machines to emulate."""
    rate: str = "100mbit"
    """Rate of every link, in both directions: a number and bit, kbit, mbit or gbit; none: not shaped."""
    local_size: int = 1
    """Ranks on each node."""
    slow: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NODE=RATE of a link that differs; may be repeated."""
    link: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NODE-NODE=RATE of what two nodes can send each other, such as 0-2=10mbit; may be repeated."""
    delay: str | None = None
    """Time that every frame takes from node to node, one way, such as 10ms (needs the kernel's netem)."""
    loss: str | None = None
    """Share of the frames that are lost, such as 0.1% (needs the kernel's netem)."""
    memory: str | None = None
    """Most memory of each rank, such as 1gb: a limit of the kernel (RLIMIT_DATA), which `thinwire train` takes for its
    --memory."""
    disk_rate: str | None = None
    """Rate to which reads and writes of each rank's disk are held together, such as 500MB/s, where `thinwire train` or
    a `thinwire.Residency` in its script states none."""
    check: bool = False
    """Measure every link instead of running a command; exit code 1 where one is more than 5 % off."""


def command_line() -> CommandLine:
    """The flags of `thinwire lab`."""
    return CommandLine("thinwire lab", LabOptions)


def run_lab(args: Sequence[str]) -> int:
    """Run the command line. Return the exit code. Raises ConfigError before anything is made."""
    options, spec, command = read(args)
    limit = None if options.memory is None else memory_bytes(options.memory)
    env = dict(os.environ) | {LAB: shlex.join(["thinwire", "lab", *args[: len(args) - len(command) - 1]])}
    if options.disk_rate is not None:
        env |= disk_variable(options.disk_rate)
        say(f"what a rank keeps on a disk moves at {options.disk_rate} at most, unless it states a rate itself")
    return run_check(spec) if options.check else run_command(spec, command, env, limit)


def read(args: Sequence[str]) -> tuple[LabOptions, LabSpec, list[str]]:
    """The options, the network and the command. Raises ConfigError with all errors at once."""
    args = list(args)
    split = args.index("--") if "--" in args else len(args)
    problems, command = Problems(), args[split + 1 :]
    hint = "the command to run comes after --"
    options = LabOptions(**command_line().read(args[:split], problems, hint=hint)[""])
    spec, slow, link = LabSpec(), dict[int, str](), dict[tuple[int, int], str]()
    problems.note(check_requirements)
    for text in options.slow:
        slow |= problems.note(parse_slow, text) or {}
    if options.memory is not None:
        problems.note(check_memory, options.memory, command)
    if options.disk_rate is not None:
        problems.note(disk_variable, options.disk_rate)
    for text in options.link:
        link |= problems.note(parse_link, text) or {}
    with problems.collect():
        spec = LabSpec(
            options.nodes, optional(options.rate), options.local_size, slow, options.delay, options.loss, link
        )
    with problems.collect():
        if not options.check:
            check_command(command, os.environ)
        elif options.nodes == 1:
            raise ConfigError("--check: a network of 1 node has no link to measure; nearest: --nodes 2")
        elif command:
            raise ConfigError(f"--check runs no command: leave out {shlex.join(command)!r}, or --check")
    problems.raise_any()
    return options, spec, command


def memory_bytes(text: str) -> int:
    """Bytes of a text such as 1gb. Raises ConfigError."""
    # It brings torch, which the lab needs for nothing else.
    from thinwire.methods.memory import read_bytes

    limit = read_bytes(text, "--memory")
    if not limit:
        raise ConfigError(f"--memory {text!r}: must be above 0; nearest: '1gb'")
    return limit


def check_memory(text: str, command: Sequence[str]) -> None:
    """Raise ConfigError for no memory, and for less than a worker of thinwire needs to load torch."""
    from thinwire.calibration.process import process_memory

    limit, is_own = memory_bytes(text), "thinwire" in (Path(word).name for word in command[:3])
    if is_own and "train" in command[:4] and limit < (least := process_memory().data):
        raise ConfigError(
            f"--memory {text!r}: must be above the {least / 1e6:.0f} MB that a worker takes before it has a model; "
            f"nearest: '{math.ceil(1.25 * least / 1e9)}gb'"
        )


def disk_variable(text: str) -> dict[str, str]:
    """The variable by which ranks are told of a rate such as 500MB/s. Raises ConfigError."""
    from thinwire.methods.memory import LENT_RATE, read_byte_rate

    read_byte_rate(text)
    return {LENT_RATE: text}


def run_command(spec: LabSpec, command: Sequence[str], env: dict[str, str], limit: int | None = None) -> int:
    """Run the command on every node. Return the worst exit code, or 128 + the signal that stopped it.

    limit: most bytes of memory of a rank. Raises LabError, with that exit code, if a rank failed.
    """
    threads, reason = threads_per_rank(spec, env)
    env["OMP_NUM_THREADS"] = str(threads)
    with LabNetwork(spec) as network:
        say(describe(spec, network))
        say(f"OMP_NUM_THREADS={threads} ({reason})")
        job = start(network, command, env=env, on_line=PrefixedOutput(spec), memory_bytes=limit)
        relay = SignalRelay(job)
        job.wait()
        for line in traffic(spec, network.counters()):
            say(line)
    if relay.received:
        say(f"stopped by {signal.Signals(relay.received).name}")
        return shell_code(-relay.received)
    if job.failed:
        raise failure(spec, job)
    return 0


class PrefixedOutput:
    """Writes the ranks' lines to stdout, each behind the name of its node."""

    def __init__(self, spec: LabSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()

    def __call__(self, rank: int, line: str) -> None:
        with self._lock:
            try:
                print(f"[{name(self._spec, rank)}] {line}", flush=True)
            except BrokenPipeError:
                # The reader is gone, as in `| head`: end as other commands do. The kernel cleans up.
                os._exit(shell_code(-signal.SIGPIPE))


class SignalRelay:
    """Passes signals on to the ranks; a second one kills them."""

    def __init__(self, job: Job) -> None:
        self.received = 0
        self._job = job
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        again, self.received = bool(self.received), signum
        self._job.send_signal(signal.SIGKILL if again else signum)
        if not again:
            print("thinwire lab: stopping; a second signal kills", file=sys.stderr)


def name(spec: LabSpec, rank: int) -> str:
    return f"node {spec.node(rank)}" + (f" rank {rank}" if spec.local_size > 1 else "")


def say(line: str) -> None:
    print(f"thinwire lab: {line}", flush=True)


def describe(spec: LabSpec, network: LabNetwork) -> str:
    """A line that describes the emulated network."""
    parts = [
        f"{spec.nodes} node(s) x {spec.local_size} rank(s)",
        f"links of {spec.rate}" if spec.rate else "links not shaped",
    ]
    parts += [f"node {node}: {rate}" for node, rate in sorted(spec.slow.items())]
    parts += [f"between {first} and {second}: {rate}" for (first, second), rate in sorted(spec.link.items())]
    parts += [f"{what} {value}" for what, value in (("delay", spec.delay), ("loss", spec.loss)) if value]
    return ", ".join(parts) + (", in a user namespace" if network.in_user_namespace else "")


def traffic(spec: LabSpec, counters: Sequence[Counters]) -> Iterator[str]:
    """A table of the bytes on each link."""
    yield "bytes on each link, counted by the kernel, headers included"
    yield f"{'node':>6} {'rate':>10} {'sent':>18} {'received':>18}"
    for node, passed in enumerate(counters):
        rate = spec.slow.get(node, spec.rate) or "-"
        yield f"{node:>6} {rate:>10} {passed.sent_bytes:>18,} {passed.received_bytes:>18,}"


def failure(spec: LabSpec, job: Job) -> LabError:
    """The error that names the first failed rank and its exit."""
    assert job.failed is not None
    rank, code = job.failed
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    others = [name(spec, other) for other in job.failures if other != rank]
    text = f"{name(spec, rank)} ended with {how}"
    text += f"; {', '.join(others)} failed too" if others else ""
    text += f"; the other ranks were stopped after {GRACE_S:g} s" if job.was_cut else ""
    error = LabError(text)
    error.exit_code = job.exit_code
    return error


def run_check(spec: LabSpec) -> int:
    """Measure and print every direction of every link. Return 1 if one is out of tolerance."""
    with LabNetwork(spec) as network:
        say(describe(spec, network))
        say("mbit/s; link: frames with their headers, by the kernel's counters; goodput: what arrived, without headers")
        say(f"{'node':>6} {'direction':>18} {'asked':>10} {'link':>10} {'goodput':>10}   link / asked")
        is_right = check(network, lambda reading: say(show(reading)))
    say(f"{'every' if is_right else 'not every'} shaped link is within {TOLERANCE:.0%} of its rate")
    return 0 if is_right else 1


def show(reading: Reading) -> str:
    asked = f"{reading.asked / 1e6:g}" if reading.asked else "-"
    verdict = "not shaped" if reading.ratio is None else f"{reading.ratio:.3f}"
    verdict += "" if reading.is_right else f"  more than {TOLERANCE:.0%} off"
    rates = f"{asked:>10} {reading.link / 1e6:>10.2f} {reading.goodput / 1e6:>10.2f}"
    return f"{reading.node:>6} {reading.direction:>18} {rates}   {verdict}"
