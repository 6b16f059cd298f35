"""DDP's side of the hook. DDP inspects its annotations, which must be types here and not strings."""

from typing import Any

import torch
import torch.distributed as dist

from thinwire.data_parallel.ddp.reductions import Bucket


def hand_over(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Give the bucket to `state.launch` and tell DDP that it is done.

    DDP would wait in C++, where an error loses its type; the optimizer waits instead. With gradients as views into the
    bucket DDP has nothing left to do once the bucket is complete.
    """
    flat = bucket.buffer()
    state.launch(Bucket(bucket.index(), flat, bucket.gradients(), bucket.is_last()))
    devices: list[int | str | torch.device] = [flat.device] if flat.is_cuda else []
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    done.set_result(flat)
    return done
