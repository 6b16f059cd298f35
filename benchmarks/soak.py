"""Islands under faults for half an hour: how many the run survives, what is lost, how long it takes to go on.

    python benchmarks/soak.py [--minutes 30] [--workers 6] [--every 20 40] [--seed 0] [--no-lab] [--json FILE]

Every 20 to 40 s, drawn from the seed, one worker is killed or frozen for 10 s; now and then a message between islands
is damaged. Every worker is an island of its own, on an emulated machine of its own behind 100 Mbit/s, or with --no-lab
on this one. A fault is survived when the run goes on and ends as it was asked to.

    time to recover: seconds that a surviving island stood still for a change of membership
    tokens lost: of the steps that the islands took together, those that an island was not there for
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from thinwire.report.metrics import MembershipEvent, StepMetrics, read_events, read_metrics

FREEZE_S = 10.0
PORT = 29411
MESSAGE_FAULTS = ("corrupt", "drop")
# The exit code of a run that did not end when it was told to.
NOT_ENDED = -1


@dataclass(frozen=True)
class Outcome:
    """What came of a soak. recover_s: of every change of membership, on every island that was there before and after.

    exit_code: 130 is that of a run which was stopped as asked, -1 that of one which did not stop. tokens: trained on by
    all islands together.
    """

    faults: dict[str, int]
    exit_code: int
    steps: int
    tokens: int
    tokens_lost: int
    changes: int
    recover_median_s: float
    recover_worst_s: float
    first_loss: float
    last_loss: float
    left_processes: int

    @property
    def survived(self) -> bool:
        return self.exit_code in (0, 130) and not self.left_processes and self.last_loss < self.first_loss


def command(args: argparse.Namespace, rng: random.Random) -> list[str]:
    """What is run: one launcher, or one on each node of the lab."""
    flags = [
        "--model", "tiny", "--strategy", "streaming-diloco", "--streamingdiloco.sync-every", str(args.sync_every),
        "--seq-len", "64", "--micro-batch", "2", "--steps", "1000000", "--warmup-steps", "20", "--dtype", "fp32",
        "--timeout", str(args.timeout), "--restarts", "1000", "--checkpoint-every", "0", "--eval-sequences", "0",
        "--sample-tokens", "0", "--run-dir", str(args.run_dir), "--overwrite",
    ]  # fmt: skip
    for number in range(args.messages):
        island, step = rng.randrange(args.workers), args.sync_every * (10 + 20 * number)
        kind = MESSAGE_FAULTS[number % len(MESSAGE_FAULTS)]
        flags += ["--inject", f"{kind} island={island} operation=outer step={step}"]
    train = [sys.executable, "-m", "thinwire", "train", *flags]
    if not args.lab:
        return [*train, "--workers", str(args.workers), "--local-size", "1"]
    # One launcher to a node, which starts its worker again: none of them is a rank of torchrun's.
    script = (
        f'unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE; exec "$@" --node $NODE_RANK --join $MASTER_ADDR:{PORT}'
    )
    lab = [sys.executable, "-m", "thinwire", "lab", "--nodes", str(args.workers), "--rate", args.rate, "--"]
    return [*lab, "sh", "-c", script, "soak", *train, "--workers", "1", "--nodes", str(args.workers)]


def workers(run_dir: Path, num_islands: int) -> dict[int, int]:
    """The processes that train now, by island."""
    logs = {str(run_dir.joinpath(f"island-{n}" if n else "", "logs/rank0.log")): n for n in range(num_islands)}
    logs |= {str(run_dir / f"logs/rank{n}.log"): n for n in range(num_islands)}
    found = {}
    for stderr in Path("/proc").glob("[0-9]*/fd/2"):
        with suppress(OSError):
            island = logs.get(str(stderr.readlink()))
            if island is not None:
                found[island] = int(stderr.parent.parent.name)
    return found


def strike(pids: dict[int, int], rng: random.Random) -> str:
    """Do something to one of the workers; what it was."""
    kind, island = rng.choice(("kill", "freeze")), rng.choice(sorted(pids))
    with suppress(ProcessLookupError):
        if kind == "kill":
            os.kill(pids[island], signal.SIGKILL)
        else:
            os.kill(pids[island], signal.SIGSTOP)
            time.sleep(FREEZE_S)
            os.kill(pids[island], signal.SIGCONT)
    print(f"{time.strftime('%H:%M:%S')} {kind} island {island}, {len(pids)} were there", flush=True)
    return kind


def soak(args: argparse.Namespace) -> Outcome:
    """Run, strike, stop and look at what the islands have written."""
    rng = random.Random(args.seed)
    faults, code = dict.fromkeys(("kill", "freeze"), 0), NOT_ENDED
    # A shell without job control has what it starts in the background ignore SIGINT, and so would the run.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with (args.run_dir.parent / "soak.log").open("w") as log:
        run = subprocess.Popen(command(args, rng), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            await_steps(run, args)
            end = time.monotonic() + 60 * args.minutes
            while run.poll() is None and time.monotonic() < end:
                time.sleep(min(rng.uniform(*args.every), max(0.0, end - time.monotonic())))
                if time.monotonic() < end and (pids := workers(args.run_dir, args.workers)):
                    faults[strike(pids, rng)] += 1
            time.sleep(args.calm)
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                code = run.wait(timeout=120)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
    left = workers(args.run_dir, args.workers)
    return outcome(args, faults, code, len(left))


def await_steps(run: subprocess.Popen, args: argparse.Namespace) -> None:
    """Return when all islands have taken steps together."""
    due = time.monotonic() + 300
    while time.monotonic() < due and run.poll() is None:
        if all(len(steps) > args.sync_every for steps, _ in told(args)):
            return
        time.sleep(0.5)
    raise SystemExit(f"the islands did not begin: see {args.run_dir.parent / 'soak.log'}")


def told(args: argparse.Namespace) -> list[tuple[list[StepMetrics], list[MembershipEvent]]]:
    """Steps and changes that each island has written."""
    folders = [args.run_dir / (f"island-{number}" if number else "") for number in range(args.workers)]
    paths = [folder / "metrics.jsonl" for folder in folders]
    changes = [[event for event in read_events(path) if isinstance(event, MembershipEvent)] for path in paths]
    return list(zip(map(read_metrics, paths), changes, strict=True))


def num_fired(args: argparse.Namespace) -> int:
    """Faults of messages that have come about; an island that was started again has none any more."""
    return (args.run_dir.parent / "soak.log").read_text(errors="replace").count("fault injected")


def outcome(args: argparse.Namespace, faults: dict[str, int], code: int, num_left: int) -> Outcome:
    islands = told(args)
    last = max(steps[-1].step for steps, _ in islands)
    per_step = islands[0][0][0].tokens // islands[0][0][0].step // args.workers
    taken = [len({record.step for record in steps}) for steps, _ in islands]
    recover_s = [
        event.cost_s
        for number, (_, events) in enumerate(islands)
        for event in events
        if number not in event.joined
    ]  # fmt: skip
    losses = [record.loss for record in islands[0][0]]
    return Outcome(
        faults | {"message": num_fired(args)}, code, last, sum(taken) * per_step,
        sum(last - num for num in taken) * per_step,
        max(len(events) for _, events in islands), median(recover_s) if recover_s else 0.0, max(recover_s, default=0.0),
        median(losses[:10]), median(losses[-10:]), num_left,
    )  # fmt: skip


def read_args(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--every", type=float, nargs=2, default=(20.0, 40.0), metavar=("LEAST", "MOST"))
    parser.add_argument("--messages", type=int, default=10, help="messages to damage or to leave out")
    parser.add_argument("--calm", type=float, default=40.0, help="seconds without faults at the end")
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--no-lab", dest="lab", action="store_false")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/soak/run"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    args.run_dir = args.run_dir.absolute()
    args.run_dir.parent.mkdir(parents=True, exist_ok=True)
    return args


def show(found: Outcome) -> None:
    num_faults = sum(found.faults.values())
    print(f"faults: {num_faults} ({', '.join(f'{num} {kind}' for kind, num in found.faults.items())})")
    all_or_no = "all" if found.survived else "no"
    print(f"survived: {all_or_no}; exit code {found.exit_code}, {found.left_processes} processes left behind")
    print(f"changes of membership: {found.changes}, in {found.steps} steps")
    print(f"time to recover: median {found.recover_median_s:.1f} s, worst {found.recover_worst_s:.1f} s")
    share = found.tokens_lost / (found.tokens + found.tokens_lost)
    print(f"tokens lost: {found.tokens_lost:,} of {found.tokens + found.tokens_lost:,}, {share:.1%}")
    print(f"loss: {found.first_loss:.3f} at first, {found.last_loss:.3f} at last")


def main(words: list[str] | None = None) -> Outcome:
    args = read_args(words)
    found = soak(args)
    show(found)
    if args.json is not None:
        held: dict[str, Any] = asdict(found) | {"seed": args.seed, "workers": args.workers, "lab": args.lab}
        args.json.write_text(json.dumps(held, indent=2) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(not main().survived)
