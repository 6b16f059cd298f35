"""Which bits this machine's torch computes: matrix products and sums differ between AVX2 and AVX-512, and versions."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

# Nothing of thinwire: a fingerprint that a fault could change would have the comparison skipped instead of failed.
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3, eps=1e-4),
    "adam": lambda params: torch.optim.Adam(params, lr=3e-3, eps=1e-4, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, eps=1e-4),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}
SEQUENCE, WIDTH, VOCABULARY = 16, 64, 256


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The first half of the sha256 of all elements, in the order of the names."""
    # Clones: FSDP2 frees its whole weights by shrinking memory, which numpy would pin.
    elements = (tensors[name].detach().clone(memory_format=torch.contiguous_format) for name in sorted(tensors))
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in elements)).hexdigest()[:32]


def digest_of(digests: Iterable[str]) -> str:
    """One digest for several."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32]


def fingerprint() -> str:
    """What is equal where torch computes the same bits, in a process with one thread: twelve digits, and the kernels.

    The kernels are named too, since some of their sums differ only in shapes that are not tried here.
    """
    bits = {f"{name}/{key}": tensor for name in OPTIMIZERS for key, tensor in trained(name)}
    torch.manual_seed(1)
    matrix = torch.randn(50, 24)
    bits |= {"q": torch.linalg.qr(matrix).Q, "norm": matrix.norm(), "exp": matrix.exp(), "log": matrix.abs().log()}
    # Without the build: for the CPU and for CUDA, torch computes the same bits on a CPU.
    version = torch.__version__.partition("+")[0]
    digits = hashlib.sha256(f"{version} {digest(bits)}".encode()).hexdigest()[:12]
    return f"{digits}-{torch.backends.cpu.get_cpu_capability().lower()}"


def description() -> str:
    """What a reader is told of a fingerprint: torch's version, and the processor."""
    models = [line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    processor = models[0].partition(":")[2].strip() if models else platform.machine()
    return f"torch {torch.__version__.partition('+')[0]}, {torch.backends.cpu.get_cpu_capability()}, {processor}"


def trained(optimizer: str) -> Iterator[tuple[str, Tensor]]:
    """The weights of a small decoder with the operations of a Llama and of a plain network, after ten steps."""
    torch.manual_seed(0)
    model = Decoder()
    stepper = OPTIMIZERS[optimizer](list(model.parameters()))
    for _ in range(10):
        tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1))
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
    yield from model.named_parameters()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.before, self.after = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up, self.gate = nn.Linear(WIDTH, 172), nn.Linear(WIDTH, 172, bias=False)
        self.down = nn.Linear(172, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        heads = self.mixed(self.before(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(-2)
        inside = self.after(x)
        x = x + self.down(nn.functional.silu(self.gate(inside)) * torch.tanh(self.up(inside)))
        return nn.functional.linear(x, self.embed.weight)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
