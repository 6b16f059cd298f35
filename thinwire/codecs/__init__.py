"""A tensor as it looks on the wire, and back. Pure functions of tensors."""

from collections.abc import Iterable

import torch

from thinwire.codecs.base import Codec, Traits
from thinwire.codecs.cast import Cast
from thinwire.codecs.count_sketch import CountSketch
from thinwire.codecs.gaussian_sketch import GaussianSketch
from thinwire.codecs.hadamard import Hadamard
from thinwire.codecs.identity import Identity
from thinwire.codecs.integer import Integer
from thinwire.codecs.natural import Natural
from thinwire.codecs.random import derive_seed, paired_seed
from thinwire.codecs.random_k import RandomK
from thinwire.codecs.rows import NonzeroRows
from thinwire.codecs.sign import Sign
from thinwire.codecs.threshold import Threshold
from thinwire.codecs.topk import TopK
from thinwire.codecs.twice import Twice
from thinwire.codecs.zstd import Zstd

__all__ = [
    "Cast",
    "Codec",
    "CountSketch",
    "GaussianSketch",
    "Hadamard",
    "Identity",
    "Integer",
    "Natural",
    "RandomK",
    "NonzeroRows",
    "Sign",
    "Threshold",
    "TopK",
    "Traits",
    "Twice",
    "Zstd",
    "derive_seed",
    "paired_seed",
    "warm",
]


# A block may be a whole tensor, however large; kernels are the same for a part of one.
MOST_WARM = 1 << 16


def warm(codecs: Iterable[Codec], device: torch.device | None = None) -> None:
    """Compile every kernel that `codecs` use on the device, the CPU by default, or load it from a cache on disk.

    A launcher calls it before it starts workers, so that all of them load what one process has compiled. numba caches
    beside the package, or in a folder of the user if that is read-only, or in NUMBA_CACHE_DIR. On CUDA, torch.compile
    takes the second size that it meets as a sign that sizes vary, and compiles once more.
    """
    for codec in codecs:
        for num_blocks in (1,) if device is None or device.type == "cpu" else (2, 3):
            x = torch.zeros(num_blocks * min(codec.block, MOST_WARM), device=device)
            packet = codec.encode(x)
            codec.decode_add(packet, codec.decode(packet, x.numel()))
            if codec.rotation:
                codec.rotation.inner.decode_add(packet, x)
