"""Low-rank blocks: a projection onto what a random subspace finds, held to the singular values."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.codec_suite import gaussian, round_trip
from thinwire.codecs import LowRank
from thinwire.errors import ConfigError

CODEC = LowRank(3, 24, 40)


def test_a_block_of_that_rank_comes_out_as_it_was() -> None:
    for rank in (1, 2, 3):
        blocks = gaussian(2 * 24 * rank).view(2, 24, rank) @ gaussian(2 * rank * 40, seed=1).view(2, rank, 40)
        decoded = round_trip(CODEC, blocks).view(2, 24, 40)
        assert float((decoded - blocks).abs().max()) < 2e-5, rank


def test_what_is_lost_is_orthogonal_to_what_is_kept_and_no_less_than_the_best_approximation_loses() -> None:
    x = gaussian(24 * 40) * torch.logspace(0, -2, 24).repeat_interleave(40)
    kept = round_trip(CODEC, x)
    assert float(kept.square().sum() + (x - kept).square().sum()) == pytest.approx(float(x.square().sum()), rel=1e-5)
    best = float(torch.linalg.svdvals(x.view(24, 40))[3:].square().sum())
    assert best < float((x - kept).square().sum()) < 3 * best
    # Columns that are nearly parallel, too.
    for block in (x, torch.outer(torch.ones(24), torch.ones(40)).view(-1) + 1e-4 * gaussian(24 * 40)):
        packet = CODEC.encode(block).view(torch.float32)
        basis = packet[:72].view(24, 3)
        torch.testing.assert_close(basis.T @ basis, torch.eye(3), atol=2e-6, rtol=0)
        # Q is X^T P.
        torch.testing.assert_close(packet[72:].view(40, 3), block.view(24, 40).T @ basis, atol=1e-5, rtol=1e-5)


def test_the_flattest_spectrum_keeps_its_share_in_the_mean_over_seeds() -> None:
    codec = LowRank(2, 16, 16)
    shares = [float(round_trip(codec, torch.eye(16), seed).square().sum()) / 16 for seed in range(200)]
    assert sum(shares) / 200 == pytest.approx(2 / 16, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank 0.*nearest is 1"),
        ({"rank": 33}, "rank 33: factors of 64 x 64 must be smaller than the block; nearest is 31"),
        ({"rank": 1, "rows": 2, "columns": 2}, "of larger blocks"),
        ({"rows": 1}, "lowrank rows 1 is not a whole number from 2"),
    ],
)
def test_refused_options_say_why(options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LowRank(**options)
