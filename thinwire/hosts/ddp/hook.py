"""DDP's side of the hook. DDP inspects its annotations, which must be types here and not strings."""

from typing import Any

import torch
import torch.distributed as dist


def hand_over(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Give the bucket to `state.launch` and tell DDP that it is done.

    DDP would wait in C++, where an error loses its type, so `state.finish` waits instead. DDP's own copy out of a
    complete bucket comes after that. It is not needed where gradients are views into the bucket.
    """
    state.launch(bucket)
    flat = bucket.buffer()
    devices: list[int | str | torch.device] = [flat.device] if flat.is_cuda else []
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    done.set_result(flat)
    return done
