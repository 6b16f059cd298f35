"""The circular shift of a GPU's reads: the same rows, in fewer lines of the bus."""

from __future__ import annotations

import pytest
import torch

from thinwire.tiers.shift import LINE, LINE_BYTES, host_bytes, is_shifted, lines_read, shifted


@pytest.mark.parametrize("width", [16, 33, 64, 100, 602])
def test_a_shift_permutes_the_columns_and_aligns_the_lanes(width: int) -> None:
    num_rows, numbers = 40, torch.tensor([7, 0, 39, 7, 21])
    matrix, result = torch.arange(float(num_rows * width)), torch.zeros(len(numbers) * width)
    for at, number in enumerate(numbers.tolist()):
        source, target = number * width, at * width
        columns = shifted(width, source, target)
        assert columns.sort().values.tolist() == list(range(width))
        result[target + columns] = matrix[source + columns]
        if is_shifted(width):
            # But for the few that wrap around, a lane reads at its own place of a line.
            lanes, places = (target + torch.arange(width)) % LINE, (source + columns) % LINE
            assert (lanes != places).sum() < LINE
    assert torch.equal(result.view(-1, width), matrix.view(-1, width)[numbers])


def test_a_shift_saves_lines() -> None:
    """Over all places of a row in a line: at most three lines more than it fills, where it fills two or more."""
    for width in (33, 100, 602):
        found = [lines_read(width, number * width, 0) for number in range(LINE)]
        plain = [lines_read(width, number * width, 0, shifts=False) for number in range(LINE)]
        assert max(found) <= -(-width // LINE) + 3
        assert max(plain) <= 2 * -(-width // LINE) + 1
        assert width < 2 * LINE or sum(found) < 0.85 * sum(plain)
    assert lines_read(64, 64, 128) == lines_read(64, 64, 128, shifts=False) == 2


def test_what_passes_the_memory_of_the_host() -> None:
    numbers = torch.tensor([3, 9, 9, 0])
    assert host_bytes(100, numbers, direct=False) == 3 * 4 * 400
    assert host_bytes(128, numbers, direct=True) == 4 * 512
    lines = sum(lines_read(100, number * 100, at * 100) for at, number in enumerate(numbers.tolist()))
    assert 4 * 400 < host_bytes(100, numbers, direct=True) == LINE_BYTES * lines < 2 * 4 * 400
