"""Processor time of the communication thread in a step of SDP4Bit, beside that of the training thread.

    thinwire lab --nodes 4 --rate 100mbit -- python benchmarks/thread.py [--steps 12]

Every rank trains the demo model on one sequence of 128 random tokens a step, with one thread of torch. Rank 0 prints
the median over the steps of each thread's processor seconds, which depend little on what else the machine does. To
compare two versions, run them in turns.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import torch
import torch.distributed as dist

import thinwire
from thinwire.models import build_model

SEQ_LEN, VOCABULARY, WARM_UP = 128, 256, 4


def thread_seconds() -> dict[str, float]:
    """Processor seconds of each thread of this process, by its name."""
    found = {}
    for thread in threading.enumerate():
        assert thread.ident is not None
        found[thread.name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    num_steps = parser.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build_model("demo", VOCABULARY, SEQ_LEN)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = thinwire.zero(model, adamw, thinwire.SDP4Bit(), local_size=1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    steps: list[dict[str, float]] = []
    for step in range(WARM_UP + num_steps):
        tokens = torch.randint(0, VOCABULARY, (1, SEQ_LEN + 1), generator=generator)
        before, start = thread_seconds(), time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        spent = {name: seconds - before.get(name, 0.0) for name, seconds in thread_seconds().items()}
        if step >= WARM_UP:
            steps.append(spent | {"whole step, on the clock": time.perf_counter() - start})
    if dist.get_rank() == 0:
        for name in steps[-1]:
            print(f"{name}: {statistics.median(step.get(name, 0.0) for step in steps):.4f} s")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
