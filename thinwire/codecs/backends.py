"""Which implementation runs where: numba on CPU, the reference under torch.compile on CUDA, the reference elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs import reference


def name(device: torch.device) -> str:
    return "torch"


def flat_fp32(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).to(torch.float32).contiguous()


def packet_buffer(out, num_bytes, device):
    if out is None:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if out.numel() != num_bytes or out.dtype != torch.uint8 or not out.is_contiguous():
        raise ValueError("bad out")
    return out


def check_buffers(packet, num_bytes, out, num_elements):
    if packet.numel() != num_bytes or out.numel() != num_elements:
        raise ValueError("bad size")


def encode(x, out, *, rotation, **kw):
    if rotation:
        x = reference.hadamard(torch.nn.functional.pad(x, (0, -x.numel() % rotation)), rotation)
    reference.encode(x, out, **kw)
    return out


def decode(packet, out, *, add, **kw):
    values = torch.empty_like(out)
    reference.decode(packet, values, **kw)
    return out.add_(values) if add else out.copy_(values)


def rotate_(x, block_size):
    return x.copy_(reference.hadamard(x, block_size))
