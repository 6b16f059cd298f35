from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from thinwire.data import BatchLoader, heldout_batches
from thinwire.data.loader import shuffled
from thinwire.errors import ConfigError

SEQ_LEN = 8
TOKENS = np.arange(SEQ_LEN * 100 + 1, dtype=np.uint16)  # 100 sequences; a sequence's first token names it


def step_of(loaders: list[BatchLoader]) -> list[int]:
    """The sequences that all ranks take in one step, in order."""
    batches = [loader.next_batch() for loader in loaders for _ in range(loader.accumulation)]
    return [int(row[0]) // SEQ_LEN for inputs, _ in batches for row in inputs]


def world(size: int, micro_batch: int, accumulation: int = 1, seed: int = 3) -> list[BatchLoader]:
    return [
        BatchLoader(
            TOKENS,
            seq_len=SEQ_LEN,
            micro_batch=micro_batch,
            accumulation=accumulation,
            rank=rank,
            world_size=size,
            seed=seed,
        )
        for rank in range(size)
    ]


def test_targets_are_one_token_ahead() -> None:
    inputs, targets = world(1, 4)[0].next_batch()
    assert inputs.shape == targets.shape == (4, SEQ_LEN)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert torch.all(inputs[:, 0] % SEQ_LEN == 0)


def test_an_epoch_visits_every_sequence_once_and_the_next_in_another_order() -> None:
    loaders = world(2, 5)
    epochs = [[s for _ in range(10) for s in step_of(loaders)] for _ in range(2)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(100))
        assert epoch != sorted(epoch)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("size", "micro_batch", "accumulation"), [(1, 4, 4), (2, 8, 1), (2, 2, 4), (4, 4, 1), (4, 1, 4)]
)
def test_every_split_of_a_step_sees_the_same_sequences(size: int, micro_batch: int, accumulation: int) -> None:
    reference, split = world(1, 16), world(size, micro_batch, accumulation)
    for _ in range(15):  # past the end of the epoch, which no step divides
        assert step_of(reference) == step_of(split)


def test_the_seed_sets_the_order() -> None:
    orders = [step_of(world(1, 50, seed=seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("num_before", [0, 3, 7, 30])  # between steps, in mid-step, in the second epoch
def test_a_saved_position_continues_alike(num_before: int) -> None:
    loader, other = world(2, 5, accumulation=2)
    for _ in range(num_before):
        loader.next_batch()
        other.next_batch()
    state = other.state_dict()
    assert state == loader.state_dict()
    resumed = world(2, 5, accumulation=2)[1]
    resumed.load_state_dict(state)
    for _ in range(25):
        for a, b in zip(other.next_batch(), resumed.next_batch(), strict=True):
            assert torch.equal(a, b)


def test_between_steps_the_world_may_change() -> None:
    before, reference = world(4, 2), world(1, 8)
    for _ in range(3):
        assert step_of(before) == step_of(reference)
    after = world(2, 2)
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    assert [s for _ in range(2) for s in step_of(after)] == step_of(reference)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 4}, "seed=3, this run has 4"),
        ({"tokens": TOKENS[:-10]}, "num_sequences=100, this run has 98"),
        ({"seq_len": 4}, "seq_len=8, this run has 4"),
        ({"micro_batch": 3}, "sequences_per_step=4, this run has 6"),
    ],
)
def test_a_position_of_other_data_is_refused(change: dict[str, Any], named: str) -> None:
    options: dict[str, Any] = {"tokens": TOKENS, "seq_len": SEQ_LEN, "micro_batch": 2, "accumulation": 2, "seed": 3}
    loader = BatchLoader(**options)
    loader.next_batch()
    with pytest.raises(ConfigError, match=f"data position: saved with {named}"):
        BatchLoader(**(options | change)).load_state_dict(loader.state_dict())


def test_a_step_larger_than_the_data_wraps_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sequences = step_of([BatchLoader(TOKENS[: 3 * SEQ_LEN + 1], seq_len=SEQ_LEN, micro_batch=7)])
    assert sorted(sequences[:3]) == sorted(sequences[3:6]) == [0, 1, 2]
    assert "one step takes 7 sequences and there are only 3" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": TOKENS[:8]}, "8 tokens are shorter than one sequence .* longest seq_len for them is 7"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"rank": 2, "world_size": 2}, r"rank=2: must lie in 0..1"),
    ],
)
def test_sizes_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchLoader(**{"tokens": TOKENS, "seq_len": SEQ_LEN, "micro_batch": 2, **change})


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1000])
def test_the_shuffle_is_a_permutation_without_pattern(size: int) -> None:
    orders = [shuffled(np.arange(size), size, s, np.full(size, e)).tolist() for s, e in ((0, 0), (0, 1), (-1, 0))]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size == 1000:
        order = np.array(orders[0])
        for other in (np.arange(size), [*order[1:], 0], orders[1], orders[2]):
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.12  # 0.03 is one standard deviation


def test_held_out_sequences_are_disjoint_even_and_spread() -> None:
    shares = [
        [
            int(row[0]) // SEQ_LEN
            for inputs, targets in heldout_batches(
                TOKENS, seq_len=SEQ_LEN, micro_batch=3, rank=rank, world_size=4, max_sequences=22
            )
            for row in inputs
            if torch.equal(targets, inputs + 1)
        ]
        for rank in range(4)
    ]
    assert [len(share) for share in shares] == [5, 5, 5, 5]
    assert [s for share in shares for s in share] == list(range(0, 100, 5))


def test_held_out_sequences_fewer_than_ranks_go_to_every_rank() -> None:
    tokens = TOKENS[: 2 * SEQ_LEN + 1]
    for rank in range(4):
        ((inputs, _),) = heldout_batches(tokens, seq_len=SEQ_LEN, micro_batch=8, rank=rank, world_size=4)
        assert inputs[:, 0].tolist() == [0, SEQ_LEN]
