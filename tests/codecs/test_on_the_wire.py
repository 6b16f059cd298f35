"""Codecs between real processes: sums of packets and of what they decode to, held to the same sums in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance.codec_suite import gaussian
from tests.workers import run_workers
from thinwire.codecs import (
    Cast,
    Codec,
    CountSketch,
    GaussianSketch,
    Identity,
    Integer,
    Natural,
    RandomK,
    Sign,
    Threshold,
    TopK,
    derive_seed,
    paired_seed,
)
from thinwire.collectives import Communicator
from thinwire.collectives.feedback import HOP_INTER

SEED = 11
CODECS: list[Codec] = [
    TopK(0.05, 64),
    TopK(0.25, 64, Integer(8, 16)),
    Threshold(0.1, 128, stride=4),
    RandomK(8),
    RandomK(4, Cast(), unbiased=False),
    Sign(64),
    Natural(4, 64),
    CountSketch(4, 64),
    GaussianSketch(4, 64, unbiased=False),
]
LINEAR: list[Codec] = [Identity(), RandomK(8), CountSketch(4, 64), GaussianSketch(4, 64)]
WORLD_SIZE = 2


def slice_length(codec: Codec) -> int:
    return -(-300 // codec.block) * codec.block


def reduce_with_every_codec(rank: int, world_size: int) -> list[Tensor]:
    comm = Communicator(local_size=1)
    shards = []
    for codec in CODECS:
        x = gaussian(slice_length(codec) * world_size, seed=rank)
        shards.append(comm.wait(comm.reduce_scatter(x, codec, seed=SEED)).clone())
    comm.close()
    return shards


def test_reduce_scatter_adds_what_every_rank_decodes() -> None:
    results = run_workers(reduce_with_every_codec, WORLD_SIZE, local_size=1)
    for index, codec in enumerate(CODECS):
        size = slice_length(codec)
        for rank in range(WORLD_SIZE):
            expected = torch.zeros(size)
            for source in range(WORLD_SIZE):
                part = gaussian(size * WORLD_SIZE, seed=source)[rank * size :][:size]
                seed = paired_seed(derive_seed(SEED, HOP_INTER), source)
                codec.decode_add(codec.encode(part, seed=seed, counter=rank * size), expected)
            assert torch.equal(results[rank][index], expected), codec


def all_reduce_packets(rank: int, world_size: int) -> list[Tensor]:
    """Let gloo add the fp32 sums of packets, which have one header, as it would add gradients."""
    decoded = []
    for codec in LINEAR:
        packet = codec.encode(gaussian(1000, seed=rank), seed=SEED, counter=5)
        dist.all_reduce(packet[codec.packet_bytes(0) :].view(torch.float32))
        decoded.append(codec.decode(packet, 1000))
    return decoded


def test_packets_of_linear_codecs_may_be_summed_in_place_of_gradients() -> None:
    results = run_workers(all_reduce_packets, WORLD_SIZE)
    total = sum((gaussian(1000, seed=rank) for rank in range(WORLD_SIZE)), torch.zeros(1000))
    for index, codec in enumerate(LINEAR):
        expected = codec.decode(codec.encode(total, seed=SEED, counter=5), 1000)
        torch.testing.assert_close(results[0][index], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(results[0][index], results[1][index])
