"""Which implementation runs where: numba on CPU.

Elsewhere the reference in plain torch, under torch.compile on CUDA.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import reference
from thinwire.codecs.layout import Groups, Rounding
from thinwire.codecs.random import MASK64, noise_keys, row_keys

# Device type -> the compiler of torch.compile there; eager mode makes a dozen passes over memory.
COMPILED = {"cuda": "inductor"}
# Drawn by one loop of a kernel; they stay in the first cache.
DITHERS_AT_ONCE = 4096
_is_without: ContextVar[bool] = ContextVar("is without kernels", default=False)


@functools.cache
def cpu_kernels() -> ModuleType | None:
    """The module that all numba kernels share, or None (announced once) if numba can't be imported."""
    try:
        return _import("common")
    except ImportError as error:
        warnings.warn(f"codecs run in plain torch on CPU, many times slower: {error}", stacklevel=2)
        return None


def name(device: torch.device) -> str:
    """The implementation that encodes integers and rotates on `device`: 'numba', 'torch.compile' or 'torch'."""
    if device.type == "cuda":
        return "torch.compile"
    return "numba" if device.type == "cpu" and cpu_kernels() else "torch"


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, codecs run in plain torch: for a few elements that is faster than loading a compiler."""
    token = _is_without.set(True)
    try:
        yield
    finally:
        _is_without.reset(token)


def numba_module(family: str, device: torch.device) -> ModuleType | None:
    """`thinwire.codecs.kernels.<family>` where numba runs, else None."""
    if device.type != "cpu" or _is_without.get() or cpu_kernels() is None:
        return None
    return _import(family)


@functools.cache
def _import(family: str) -> ModuleType:
    return importlib.import_module(f"thinwire.codecs.kernels.{family}")


def numba_or_torch(device: torch.device) -> str:
    """'numba' or 'torch': the implementation of codecs whose plain version is not compiled for CUDA."""
    return "numba" if device.type == "cpu" and cpu_kernels() else "torch"


def flat_fp32(x: Tensor) -> Tensor:
    """`x` as a flat contiguous fp32 tensor; `x` itself if it is one already."""
    if x.dtype == torch.float32 and x.dim() == 1 and not x.requires_grad and x.is_contiguous():
        return x
    return x.detach().reshape(-1).to(torch.float32).contiguous()


def rounding(is_stochastic: bool, seed: int) -> Rounding:
    """Nearest rounding, or stochastic rounding by the draws of a seed modulo 2^64."""
    return Rounding(is_stochastic, np.uint64(seed & MASK64))


def row_counters(numbers: Tensor, width: int, block: int) -> np.ndarray:
    """The numbers of the first elements of rows with these numbers, uint64. Raises ValueError for parts of blocks."""
    if width % block:
        raise ValueError(f"rows of {width} elements are no whole blocks of {block}")
    return (numbers.detach().cpu() * width).numpy().view(np.uint64)


def as_counters(counters: Sequence[int] | np.ndarray) -> np.ndarray:
    """Whole numbers modulo 2^64, uint64."""
    return counters if isinstance(counters, np.ndarray) else np.array([each & MASK64 for each in counters], np.uint64)


def keys_of(seed: int, counters: np.ndarray, num_elements: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`noise_keys` of a tensor in as many equal pieces as there are counters, each of a piece's first element."""
    if len(counters) == 1:
        return noise_keys(seed, int(counters[0]), num_elements, device)
    return row_keys(seed, torch.from_numpy(counters.view(np.int64)).to(device), num_elements // max(len(counters), 1))


def one_nan_(values: Tensor) -> Tensor:
    """Give every NaN of `values` the same bits, in place: which of two NaN an addition keeps is up to the compiler."""
    return values.masked_fill_(values.isnan(), torch.nan)


def packet_buffer(out: Tensor | None, num_bytes: int, device: torch.device) -> Tensor:
    """`out`, if it fits exactly this packet, or a fresh buffer. Raises ValueError for an `out` that does not fit."""
    if out is None:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    check("out", out, num_bytes, torch.uint8)
    return out


def check_buffers(packet: Tensor, num_bytes: int, out: Tensor, num_elements: int) -> None:
    """Raises ValueError unless the packet and the output have the sizes that the codec promised."""
    check("packet", packet, num_bytes, torch.uint8)
    check("out", out, num_elements, torch.float32)


def check(what: str, tensor: Tensor, size: int, dtype: torch.dtype) -> None:
    """Raises ValueError unless the tensor is flat and contiguous, of this size and dtype."""
    if tensor.dtype != dtype or tensor.shape != (size,) or not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be a flat contiguous {dtype} tensor of {size} elements, "
            f"not {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        )


def encode(
    xs: Sequence[Tensor], outs: Sequence[Tensor], groups: Groups, *, rotation: int, is_stochastic: bool, seed: int,
    counters: Sequence[int] | np.ndarray,
) -> None:  # fmt: skip
    """Encode H x of each tensor (`rotation` 0: x itself) as integers; x is zero-padded to whole rows.

    Args:
        seed, counters: of the draws of stochastic rounding; counters: the number of the first element of each piece.
            All tensors are in equally many pieces of equal size, in most cases one.

    Shape:
        xs: flat contiguous fp32, n elements each, one at least. outs: uint8, packets of n elements, padded to whole
            rows.
    """
    kernels, n = numba_module("integer", xs[0].device), xs[0].numel()
    num = n + (-n % rotation if rotation else 0)
    of_pieces = as_counters(counters).reshape(len(xs), -1)
    if kernels is None:
        for x, out, own in zip(xs, outs, of_pieces, strict=True):
            _plain_encode(torch.nn.functional.pad(x, (0, num - n)), out, groups, rotation, is_stochastic, seed, own)
        return
    codes_at, _, num_bytes = groups.sections(num)
    size = min(groups.size, num)
    # A word more than half of them, as the first element may have the second dither of a word.
    words = np.empty(max(size, DITHERS_AT_ONCE) // 2 + 2 if is_stochastic else 0, np.uint32)
    kernels.encode(
        _addresses(xs), n, _addresses(outs), codes_at, num_bytes, groups, rotation, rounding(is_stochastic, seed),
        of_pieces, np.empty(size if rotation else 0, np.float32), np.empty(3 * rotation, np.float32),
        np.empty(size + 8, np.uint8), words, words.view(np.int16),
    )  # fmt: skip


def _plain_encode(
    x: Tensor, out: Tensor, groups: Groups, rotation: int, is_stochastic: bool, seed: int,
    counters: np.ndarray,
) -> None:  # fmt: skip
    keys, low = keys_of(seed, counters, x.numel(), x.device) if is_stochastic else (None, None)

    def quantise(rows: Tensor, start: int) -> tuple[Tensor, Tensor]:
        run = _plain("encode_rows", rows, groups.size, rotation, groups.bits, groups.bf16)
        return run(rows, keys, None if low is None else low + start)

    reference.encode_groups(quantise, x, out, groups)


def decode(packets: Sequence[Sequence[Tensor]], outs: Sequence[Tensor], groups: Groups, *, add: bool) -> None:
    """Decode integers: each out = the sum of its packets' values in their order, or, with `add`, out += each of them.

    Shape:
        packets: uint8, each the packet of n elements; equally many for each out. outs: fp32 [n], one at least.
    """
    kernels, n = numba_module("integer", outs[0].device), outs[0].numel()
    if kernels is None:
        for out, own in zip(outs, packets, strict=True):
            for number, packet in enumerate(own):
                run = partial(_plain_decode, groups=groups, add=add or number > 0)
                reference.decode_groups(run, packet, out, groups)
        return
    codes_at, _, _ = groups.sections(n)
    addresses = np.array([[packet.data_ptr() for packet in own] for own in packets], np.uint64)
    kernels.decode(addresses, codes_at, _addresses(outs), n, groups, add, np.empty(min(groups.size, n) + 8, np.uint8))


def is_any_marked(packets: Sequence[Tensor], groups: Groups, num_elements: int) -> bool:
    """Whether a scale of any packet, of `num_elements` elements, has its sign bit set."""
    end_of_scales, _, _ = groups.sections(num_elements)
    kernels = numba_module("integer", packets[0].device)
    if kernels is None:
        scales = torch.cat([packet[:end_of_scales] for packet in packets])
        return bool((scales.view(torch.int16 if groups.bf16 else torch.int32) < 0).any())
    return kernels.is_any_marked(_addresses(packets), end_of_scales // (2 if groups.bf16 else 4), groups.shift)


def _addresses(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.array([tensor.data_ptr() for tensor in tensors], np.uint64)


def _plain_decode(rows: Tensor, scales: Tensor, packed: Tensor, *, groups: Groups, add: bool) -> None:
    _plain("decode_rows", rows, groups.size, groups.bits, add)(rows, scales, packed)


def rotate_(x: Tensor, block_size: int) -> Tensor:
    """x <- H x in place. Raises ValueError unless x is flat, contiguous, fp32 and of whole rows."""
    check("x", x, -(-x.numel() // block_size) * block_size, torch.float32)
    kernels = numba_module("hadamard", x.device)
    if kernels is None:
        rows = x.view(-1, block_size)
        return x.copy_(_plain("hadamard", rows, block_size, block_size)(rows))
    kernels.rotate_inplace(x.detach().numpy(), block_size, np.empty(3 * block_size, np.float32))
    return x


def _plain(function: str, rows: Tensor, width: int, *options: int) -> Callable[..., Any]:
    """`reference.function` with its last arguments, compiled for rows of whole groups where COMPILED says so.

    A tail is shorter than a group, and would only make the compiler give up the constant width.
    """
    if rows.device.type in COMPILED and rows.shape[1] == width:
        return _compiled(function, COMPILED[rows.device.type], width, *options)
    return _bound(getattr(reference, function), options)


@functools.cache
def _compiled(function: str, backend: str, width: int, *options: int) -> Callable[..., Any]:
    """`_bound`, compiled by itself: a width or number of bits that varies would turn into a variable of the kernel.

    torch.compile remembers what varied, and how often it compiled, for each piece of code. So every format gets a
    function of its own, from source in which its options are written out.
    """
    name = "_".join(map(str, (function, width, *options)))
    source = f"def {name}(*tensors):\n    return {function}(*tensors, {', '.join(map(str, options))})\n"
    scope = {function: getattr(reference, function)}
    exec(compile(source, f"<{name}>", "exec"), scope)
    return torch.compile(scope[name], backend=backend, fullgraph=True)


def _bound(function: Callable[..., Any], options: tuple[int, ...]) -> Any:
    def run(*tensors: Tensor | None) -> Any:
        return function(*tensors, *options)

    return run


def sections(packet: np.ndarray, num: int, groups: Groups) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The packet's scales (as int16 or int32), its codes and its last zeros, as views."""
    end_of_scales, used, _ = groups.sections(num)
    scales = packet[:end_of_scales].view(np.int16 if groups.bf16 else np.int32)
    return scales, packet[end_of_scales:used], packet[used:]
