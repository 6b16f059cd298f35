"""Between DDP's hook and a reduction: turns buckets into communication jobs and waits for them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Communicator, staging
from thinwire.collectives.gather import all_gather_exact
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.methods.reduction import Bucket, Reduction, Step
from thinwire.state.clipping import Clipping


class BucketReducer:
    """Runs a reduction on every bucket that DDP completes, on the communication thread.

    The training thread must call `finish` after the backward, before gradients are used.

    Args:
        names: names of the trained parameters for the reduction.
        lrs: returns the learning rates by those names; called once a step.
        alone: run the reduction in a world of one too.
    """

    def __init__(
        self,
        comm: Communicator,
        reduction: Reduction,
        trained: Mapping[str, nn.Parameter],
        lrs: Callable[[], Mapping[str, float]],
        *,
        alone: bool = False,
    ) -> None:
        self.comm = comm
        self.reduction = reduction
        self.steps = 0
        self.clipping = Clipping()
        self.is_idle = False
        self.all_launched = False
        self._names = {id(param): name for name, param in trained.items()}
        self._lrs = lrs
        self._alone = alone
        self._step: Step | None = None
        self._reducing: dict[int, tuple[Bucket, Future[None]]] = {}

    def launch(self, grads: dist.GradBucket) -> None:
        """Average a complete bucket in the background. DDP's hook calls this. Does nothing while `is_idle`."""
        if self.is_idle:
            return
        names = [self._names[id(param)] for param in grads.parameters()]
        laid = [as_laid(*pair) for pair in zip(grads.gradients(), grads.parameters(), strict=True)]
        bucket = Bucket(grads.index(), names, grads.buffer(), laid, grads.is_last())
        self.all_launched = self.all_launched or bucket.last
        if self.comm.world_size == 1 and not self._alone:
            return
        if bucket.number in self._reducing:
            raise RuntimeError(
                "a second backward changed gradients that were sent already: wrap every forward and backward but the "
                "last of a step in `with optimizer.no_sync():`"
            )
        self._step = self._step or Step(self.steps, self._lrs())
        self._reducing[bucket.number] = bucket, self.comm.submit(self._job(bucket, self._step))

    def _job(self, bucket: Bucket, step: Step) -> Callable[[Link], Generator[Any, None, None]]:
        def job(link: Link) -> Generator[Any, None, None]:
            try:
                held = yield from on_host(link, bucket)
                ordered = in_order(link, held)
                yield from self.reduction.run(link, ordered, step)
                if ordered is not held:
                    torch._foreach_copy_(held.grads, ordered.grads)
                if held is not bucket:
                    staging.to_device(held.flat, bucket.flat)
            except RuntimeError:
                # gloo does not say which rank is missing; a message from each rank shows it.
                yield from all_gather_exact(link, torch.zeros(1))
                raise

        return job

    def finish(self) -> list[Tensor]:
        """Wait for all buckets. Return them, flat, each holding its mean. Raises an error of the reduction.

        Where gradients are not views into the buckets, DDP copies them back only after this.
        """
        means = []
        for bucket, reducing in self._reducing.values():
            self.comm.wait(reducing)
            means.append(bucket.flat)
        self._reducing.clear()
        self._step = None
        self.all_launched = False
        self.steps += 1
        return means

    def note_clipping(self, norm: float, max_norm: float) -> None:
        """Note that the means of the last step, with this norm, were clipped to `max_norm`."""
        clip = self.clipping.note(norm, max_norm)
        if clip.factor < 1.0:
            self.reduction.state.scale_residuals(clip)

    def state_dict(self) -> dict[str, Any]:
        """The reduction's state on this rank."""
        return {"steps": self.steps, "clipped": self.clipping.last, "reduction": self.reduction.state.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state_dict."""
        self.steps, self.clipping.last = state["steps"], state["clipped"]
        self.reduction.state.load_state_dict(state["reduction"])


def on_host(link: Link, bucket: Bucket) -> Rounds[Bucket]:
    """The bucket, or a copy on the CPU if it is on a device, with gradients as views into the copy. A part of a job.

    gloo sums on the CPU, and the job does not know what torch's own hooks queue on their own streams.
    """
    if not staging.must_stage(bucket.flat):
        return bucket
    flat = link.scratch("bucket", bucket.flat.numel(), dtype=bucket.flat.dtype)
    staging.to_host(bucket.flat, flat)
    yield staging.queued()
    first = bucket.flat.storage_offset()
    grads = [flat.as_strided(grad.shape, grad.stride(), grad.storage_offset() - first) for grad in bucket.grads]
    return replace(bucket, flat=flat, grads=grads)


def as_laid(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient as DDP laid it into the bucket: in the order of the parameter's memory, which the hook is not told.

    This is so for dense memory, such as channels_last and transposed matrices.
    """
    if param.is_contiguous() or torch.empty_like(param, device="meta").stride() != param.stride():
        return grad
    return grad.as_strided(param.shape, param.stride(), grad.storage_offset())


def in_order(link: Link, bucket: Bucket) -> Bucket:
    """The bucket, or a copy of it in which the elements of every gradient lie in the order of their indices."""
    if all(grad.is_contiguous() for grad in bucket.grads):
        return bucket
    flat = link.scratch("ordered", bucket.flat.numel(), dtype=bucket.flat.dtype).copy_(bucket.flat)
    first = bucket.flat.storage_offset()
    starts = [grad.storage_offset() - first for grad in bucket.grads]
    grads = [
        flat[start:][: grad.numel()].view(grad.shape).copy_(grad)
        for start, grad in zip(starts, bucket.grads, strict=True)
    ]
    return replace(bucket, flat=flat, grads=grads)


def learning_rates(trained: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """Learning rate of each parameter, by name; empty without an optimizer."""
    if optimizer is None:
        return {}
    names = {id(param): name for name, param in trained.items()}
    return {
        names[id(param)]: float(group["lr"])
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) in names
    }
