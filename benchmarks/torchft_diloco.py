"""torchft's DiLoCo as a contestant of `thinwire compare`: the same model, data and inner steps, its own outer ones.

    thinwire compare --strategies 'diloco,cmd:torchft=python3 benchmarks/torchft_diloco.py --config {config}
        --run-dir {run_dir} --steps {steps}' --lab nodes=4,rate=100mbit -- --model demo --steps 300

With --num-fragments, --overlap-steps and --mix it is torchft's Streaming DiLoCo, on `streaming-diloco`'s fragments.

One process an island, with the variables of torchrun. Needs torchft (0.2.0 was tried), which thinwire never installs.
Every island is a replica group of one rank; the lighthouse runs beside rank 0. Bytes are left to the kernel's counters.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
from rival import Rival, parser_of
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from thinwire.layout.fragments import cut
from thinwire.training.engine import build_optimizer

WAIT = timedelta(seconds=120)


def own_address(others: str) -> str:
    """Of this process, as those see it that share a link with `others`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((others, 1))
        return str(probe.getsockname()[0])


def manager_of(model: nn.Module, optimizer: torch.optim.Optimizer, store: TCPStore, rank: int, count: int) -> Manager:
    """torchft's manager of this island, in step with all others."""

    def load(state: dict[str, dict]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    own = own_address(os.environ["MASTER_ADDR"])
    return Manager(
        pg=ProcessGroupGloo(timeout=WAIT), min_replica_size=count, use_async_quorum=False, rank=0, world_size=1,
        load_state_dict=load, state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"island-{rank}", store_addr=own, store_port=store.port, hostname=own, init_sync=False,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        timeout=WAIT, quorum_timeout=WAIT, connect_timeout=WAIT,
    )  # fmt: skip


def fragments_of(model: nn.Module, num_fragments: int) -> list[nn.Module]:
    """The model's parameters, as modules that torchft exchanges in turn."""
    named = dict(model.named_parameters())
    modules = []
    for fragment in cut(model, num_fragments, "strided", 1):
        modules.append(nn.Module())
        for name in fragment.names:
            modules[-1].register_parameter(name.replace(".", "_"), named[name])
    return modules


def train(rival: Rival, arguments: argparse.Namespace) -> None:
    model = rival.model()
    inner = build_optimizer(rival.config, model)
    fragments = fragments_of(model, arguments.num_fragments)
    outer = [
        torch.optim.SGD(fragment.parameters(), lr=arguments.outer_lr, momentum=0.9, nesterov=True)
        for fragment in fragments
    ]
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    manager = manager_of(model, inner, store, rival.rank, rival.world_size)

    def update(lr: float) -> Mapping[str, float]:
        for group in inner.param_groups:
            group["lr"] = lr
        nn.utils.clip_grad_norm_(model.parameters(), rival.config.grad_clip or math.inf)
        inner.step()
        inner.zero_grad()
        return {}

    with DiLoCo(
        manager, fragments, inner, outer, sync_every=arguments.sync_every, pin_memory=False,
        fragment_sync_delay=arguments.overlap_steps, fragment_update_alpha=arguments.mix,
    ):  # fmt: skip
        rival.train(model, update)
    manager.shutdown(wait=False)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--sync-every", type=int, default=100)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--num-fragments", type=int, default=1)
    parser.add_argument("--overlap-steps", type=int, default=0)
    parser.add_argument("--mix", type=float, default=0.0)
    arguments = parser.parse_args()
    rival = Rival.of(arguments)
    lighthouse = None
    if rival.rank == 0:
        # It waits a while for those who have not come yet, and for nobody once all have.
        bind = f"0.0.0.0:{os.environ['MASTER_PORT']}"
        lighthouse = LighthouseServer(bind=bind, min_replicas=rival.world_size, join_timeout_ms=60_000)
    train(rival, arguments)
    if lighthouse is not None:
        # The others still leave.
        time.sleep(2)
        lighthouse.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
