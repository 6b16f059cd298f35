"""Orders of a pipeline of compiled layers against torch's runtime with the same layers, on GPUs or processors.

    torchrun --nproc-per-node 4 benchmarks/pipeline_gpu.py
    torchrun --nproc-per-node 2 benchmarks/pipeline_gpu.py --device cpu --layers 2 --hidden 64 --tokens 32

Each rank has some layers of a transformer, in bf16 on a GPU. First they run as they are, then through torch.compile:
the 1F1B of torch.distributed.pipelining, thinwire's, and the order that is fitted to what the ranks have measured.
Prints for each the median seconds of a step of the slowest rank; how many times as fast as torch's the fitted one is;
how far gradients are from torch's; and how many times as fast compiled layers are. torch sends from GPU to GPU by NCCL,
which needs a GPU for each rank: with fewer its row is left out. thinwire's messages go through the processor's memory.
It has not run on a GPU yet; its half for a processor is a test.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pipeline import timed
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from thinwire.collectives import Communicator, Mailbox, Topology
from thinwire.hosts.pipeline import Runner
from thinwire.hosts.pipeline.measured import measured
from thinwire.methods.pipeline import Plan, fitted, plan


def loss_of(left: Tensor, target: Tensor | None = None) -> Tensor:
    """The loss of a micro-batch."""
    return left.float().square().mean()


class Part(nn.Module):
    """Some layers; called as torch's runtime calls a stage, and as thinwire's does."""

    def __init__(self, args: argparse.Namespace, rank: int, gives_loss: bool) -> None:
        super().__init__()
        torch.manual_seed(rank)
        each = [
            nn.TransformerEncoderLayer(
                args.hidden, args.heads, 4 * args.hidden, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(args.layers)
        ]
        self.layers, self.gives_loss = nn.Sequential(*each), gives_loss

    def forward(self, hidden: Tensor | None, micro_batch: Tensor | None = None) -> Tensor:
        left = self.layers(micro_batch if hidden is None else hidden)
        return loss_of(left) if self.gives_loss else left


@dataclass
class Rank:
    """This rank's place, device and options."""

    args: argparse.Namespace
    comm: Communicator
    mailbox: Mailbox
    device: torch.device
    is_compiled: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @property
    def size(self) -> int:
        return self.comm.world_size

    def micro_batches(self) -> list[Tensor]:
        """The same on all ranks."""
        draw, args = torch.Generator().manual_seed(7), self.args
        shape = (args.micro_batches, args.batch, args.tokens, args.hidden)
        return list(torch.randn(shape, generator=draw).to(self.device, self.dtype))

    def part(self, *, gives_loss: bool) -> Part:
        """The layers of this rank."""
        made = Part(self.args, self.comm.rank, gives_loss).to(self.device, self.dtype)
        if self.is_compiled:
            made.layers.compile(backend=self.args.backend)
        return made

    def timed(self, step: Callable[[], object]) -> float:
        """Seconds of a step, until the device is done."""

        def whole() -> None:
            step()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return timed(whole, self.args.repeats)

    def gradients(self, part: Part, step: Callable[[], object]) -> Tensor:
        """Those of one step, flat."""
        part.zero_grad()
        step()
        return torch.cat([param.grad.float().flatten() for param in part.parameters() if param.grad is not None])

    def of_torch(self) -> tuple[float, Tensor]:
        """Seconds and gradients of torch's 1F1B."""
        part, rank, last = self.part(gives_loss=False), self.comm.rank, self.size - 1
        stage = PipelineStage(part, rank, self.size, self.device)
        schedule = Schedule1F1B(stage, self.args.micro_batches, loss_fn=loss_of)
        whole = torch.cat(self.micro_batches())

        def step() -> None:
            given: dict[str, Any] = {"target": whole} if rank == last else {}
            schedule.step(*([whole] if rank == 0 else []), **given)

        return self.timed(step), self.gradients(part, step)

    def of_ours(self) -> tuple[float, float, Tensor]:
        """Seconds of 1F1B and of the fitted order, and the gradients of 1F1B."""
        part, rank = self.part(gives_loss=self.comm.rank == self.size - 1), self.comm.rank
        given = self.micro_batches()

        def runner(made: Plan) -> Runner:
            return Runner(
                made, {rank: part}, self.mailbox, lambda _, each: tuple(each.shape), dtype=self.dtype,
                device=self.device,
            )  # fmt: skip

        known = runner(plan("1f1b", self.size, len(given)))
        known_s = self.timed(lambda: known.run(given))
        gradients = self.gradients(part, lambda: known.run(given))
        costs = measured(known, self.comm, given)
        best = runner(fitted(known.plan.home, known.plan.paths, costs))
        return known_s, self.timed(lambda: best.run(given)), gradients


def lines_of(rank: Rank, has_torch: bool) -> tuple[str, float]:
    """A line on the layers as they are, or compiled, and the seconds of the fitted order."""
    known_s, fitted_s, gradients = rank.of_ours()
    told = f"{'compiled' if rank.is_compiled else 'as they are'}: 1f1b {known_s:.4f} s, fitted {fitted_s:.4f} s"
    if has_torch:
        torch_s, expected = rank.of_torch()
        off = (gradients - expected).norm() / expected.norm()
        most = float(rank.comm.wait(rank.comm.all_gather_exact(off.cpu()[None])).max())
        told += f", 1f1b of torch {torch_s:.4f} s; fitted is {torch_s / fitted_s:.2f} times as fast, gradients differ "
        told += f"by {most:.0e}"
    return told, fitted_s


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The options. Ends with code 2 for a device that is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager needs no C++ compiler")
    parser.add_argument("--layers", type=int, default=4, help="of a rank")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(given)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no GPU; nearest: --device cpu, with small sizes")
    return args


def main(given: Sequence[str] | None = None) -> list[str]:
    """Print the lines on rank 0, and return them."""
    args, starts = parsed(given), not dist.is_initialized()
    size, device = int(os.environ.get("WORLD_SIZE", "1")), torch.device("cpu")
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    has_torch = args.device == "cpu" or torch.cuda.device_count() >= local_size
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if starts:
        dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" and has_torch else "gloo")
    comm, mailbox = Communicator(local_size=local_size), Mailbox(None, Topology(size // local_size, local_size))
    lines, seconds = [], []
    for is_compiled in (False, True):
        line, took_s = lines_of(Rank(args, comm, mailbox, device, is_compiled), has_torch)
        lines.append(line)
        seconds.append(took_s)
    lines.append(f"compiled layers: {seconds[0] / seconds[1]:.2f} times as fast")
    if not has_torch:
        lines.append(f"without torch's runtime: {local_size} ranks share {torch.cuda.device_count()} GPU(s)")
    if comm.rank == 0:
        print("\n".join(lines), flush=True)
    mailbox.close()
    comm.close()
    if starts:
        dist.destroy_process_group()
    return lines


if __name__ == "__main__":
    main()
