"""A bucket of gradients on a CUDA device, averaged in the memory of the CPU."""

from __future__ import annotations

from dataclasses import replace

from thinwire.collectives import staging
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.methods.reduction import Bucket


def on_host(link: Link, bucket: Bucket) -> Rounds[Bucket]:
    """The bucket, or a copy of it on the CPU where it lies on a device, gradients as views into that; a part of a job.

    gloo sums on the CPU, and what torch's own hooks queue on streams of their own is not known to the job.
    """
    if not staging.must_stage(bucket.flat):
        return bucket
    flat = link.scratch("bucket", bucket.flat.numel(), dtype=bucket.flat.dtype)
    staging.to_host(bucket.flat, flat)
    yield staging.queued()
    first = bucket.flat.storage_offset()
    grads = [flat.as_strided(grad.shape, grad.stride(), grad.storage_offset() - first) for grad in bucket.grads]
    return replace(bucket, flat=flat, grads=grads)
