"""Measures how much a rank computes in a second, for each kind of work in a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from thinwire.codecs import Codec
from thinwire.codecs.grammar import read
from thinwire.cost.machine import LAYER, MIXTURE, launch_of
from thinwire.device import Device
from thinwire.models import Llama, MoEConfig, MoELlama
from thinwire.models.llama import LlamaConfig

# Repeats after two that warm up, unless they take longer than this.
NUM_REPEATS, NUM_LEAST, LONGEST_S = 20, 3, 1.0
# The same of products, which a run's start waits for.
PRODUCT_S = 0.1
# What a transformer's step reaches of a matrix product's speed: 0.5 to 0.6, the demo model on a CPU.
EFFICIENCY = 0.5
PACKED_ELEMENTS = 1 << 17
COPIED_BYTES = 1 << 24
# Sequences of a pass through a layer, and their tokens. A short pass is mostly what a pass costs beside its operations.
# Of two long ones the longer may be slower in each operation, as its tensors outgrow a cache; that would hide the cost.
LONG, SHORT = (4, 256), (1, 32)


@dataclass(frozen=True)
class Probe:
    """A piece of work that can be repeated, and its amount; see `thinwire.cost.Work`."""

    kind: str
    amount: float
    run: Callable[[], object]


def seconds_of(run: Callable[[], object], longest_s: float = LONGEST_S) -> float:
    """Median seconds of a run; see `repeated`."""
    return median(repeated(run, longest_s))


def repeated(run: Callable[[], object], longest_s: float = LONGEST_S) -> list[float]:
    """Seconds of each of NUM_REPEATS runs, after two to warm up; of fewer, at least NUM_LEAST, past longest_s."""
    for _ in range(2):
        run()
    found: list[float] = []
    due = time.perf_counter() + longest_s
    while len(found) < NUM_LEAST or (len(found) < NUM_REPEATS and time.perf_counter() < due):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found


def matrix_flops(dtype: torch.dtype, device: Device) -> float:
    """Floating-point operations per second of a product of square matrices, on this process's threads; the median.

    The values are random: with zeros, some devices draw less power and run at a higher clock.
    """
    size = 768 if device.kind == "cpu" else 4096
    a, b = (torch.randn(size, size).to(device.torch, dtype) for _ in range(2))

    def multiply() -> None:
        torch.mm(a, b)
        device.synchronize()

    return 2 * size**3 / seconds_of(multiply, PRODUCT_S)


def step_flops(dtype: torch.dtype, device: Device) -> float:
    """Operations per second of a transformer's forward and backward, guessed from products of matrices."""
    return EFFICIENCY * matrix_flops(dtype, device)


def probes(layers: Iterable[LlamaConfig], dtypes: Iterable[str], codecs: Iterable[str], device: Device) -> list[Probe]:
    """The work of a step. layers: sizes of models of which one layer is timed. dtypes: "fp32" or "bf16"."""
    sizes = (LONG, SHORT)
    found = [layer_probe(config, dtype, device, size) for dtype in dtypes for config in layers for size in sizes]
    source, target = (torch.ones(COPIED_BYTES // 4, device=device.torch) for _ in range(2))
    found.append(Probe("copy", 2 * COPIED_BYTES, waited(device, partial(target.copy_, source))))
    x = torch.randn(PACKED_ELEMENTS, generator=torch.Generator().manual_seed(0)).to(device.torch)
    for text in codecs:
        found += codec_probes(read(text), x, device)
    return found


def waited(device: Device, run: Callable[[], object]) -> Callable[[], None]:
    """The same work, until the device has done it."""

    def done() -> None:
        run()
        device.synchronize()

    return done


def layer_probe(config: LlamaConfig, dtype: str, device: Device, size: tuple[int, int]) -> Probe:
    """A forward and backward of one layer between an embedding and a head; its operations are counted by torch.

    size: LONG or SHORT.
    """
    num_sequences, seq_len = size
    is_mixture = isinstance(config, MoEConfig)
    model = MoELlama(config) if isinstance(config, MoEConfig) else Llama(config)
    model.init_weights(torch.Generator().manual_seed(0))
    placed = device.place(model)
    tokens = torch.zeros(num_sequences, min(seq_len, config.max_position_embeddings), dtype=torch.int64)
    (tokens,) = device.take([tokens])

    def forward_backward() -> None:
        with device.autocast(dtype):
            loss = placed(tokens, tokens)
        loss.backward()
        device.synchronize()

    with FlopCounterMode(display=False) as counter, torch.no_grad(), device.autocast(dtype):
        placed(tokens, tokens)
    layer = f"{MIXTURE if is_mixture else LAYER} {config.hidden_size} {dtype}"
    return Probe(layer if size == LONG else launch_of(layer), 3 * counter.get_total_flops(), forward_backward)


def pass_seconds(model: nn.Module, num_sequences: int, seq_len: int, dtype: str, device: Device) -> float:
    """Seconds of one forward and backward: the second run of two."""
    (tokens,) = device.take([torch.zeros(num_sequences, seq_len, dtype=torch.int64)])
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        with device.autocast(dtype):
            loss = model(tokens, tokens)
        loss.backward()
        device.synchronize()
        seconds = time.perf_counter() - start
    return seconds


def codec_probes(codec: Codec, x: Tensor, device: Device) -> Iterable[Probe]:
    """Encoding and decode-adding where the tensor lies; the amount is in bytes of packets."""
    packet = codec.encode(x)
    total = torch.zeros_like(x)
    yield Probe(f"encode {codec}", packet.numel(), waited(device, lambda: codec.encode(x, out=packet)))
    yield Probe(f"decode {codec}", packet.numel(), waited(device, lambda: codec.decode_add(packet, total)))
