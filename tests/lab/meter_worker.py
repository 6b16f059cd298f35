"""One rank that gathers messages of 1 MiB and prints what its meter counted."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

from thinwire.collectives import Communicator

MESSAGES = 6


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    communicator = Communicator(local_size=1)
    for number in range(MESSAGES):
        mine = torch.full((1 << 20,), communicator.rank + number, dtype=torch.uint8)
        everyones = communicator.all_gather_exact(mine).result()
        assert everyones[:, 0].tolist() == [rank + number for rank in range(communicator.world_size)]
    reading = communicator.meter.snapshot()
    print(json.dumps([reading.sent_bytes, reading.received_bytes]), flush=True)
    communicator.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
