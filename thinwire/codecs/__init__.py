"""Ground floor: a tensor as it looks on the wire, and back. Pure functions of tensors."""

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
from thinwire.codecs.sign import Sign
from thinwire.codecs.threshold import Threshold
from thinwire.codecs.topk import TopK
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
    "Sign",
    "Threshold",
    "TopK",
    "Traits",
    "Zstd",
    "derive_seed",
    "paired_seed",
    "warm",
]


def warm(codecs: Iterable[Codec]) -> None:
    """Compile, or load from numba's cache on disk, every CPU kernel that `codecs` use: seconds once.

    A launcher calls it before it starts workers, so that they all load what one process compiled. numba
    caches beside the package, in a folder of the user where that is read-only, or in NUMBA_CACHE_DIR.
    """
    for codec in codecs:
        x = torch.zeros(codec.block)
        packet = codec.encode(x)
        codec.decode_add(packet, codec.decode(packet, x.numel()))
        codec.inner.decode_add(packet, x)
