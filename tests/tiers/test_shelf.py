"""Records on a disk: what comes back, what is refused, and what is held meanwhile."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from thinwire.codecs import Cast, Integer
from thinwire.errors import ConfigError, ThinwireError
from thinwire.tiers import BLOCK_BYTES, PLAIN, Coding, Pace, Shelf, TierMeter, check_folder


def shelf(folder: Path, numel: int = 5000, record_numel: int = 1000, rate: float | None = None) -> Shelf:
    return Shelf(folder, {"master": PLAIN, "m": PLAIN}, numel, record_numel, TierMeter(), Pace(rate))


def test_records_come_back_from_disk_and_memory(tmp_path: Path) -> None:
    own = shelf(tmp_path)
    assert (own.num_records, own.record_numel) == (5, 1024)
    expected = torch.zeros(2, 5000)
    for turn in range(4):
        for number in own.each():
            start, end = own.span(number)
            for kind, (name, values) in enumerate(own.take(number).items()):
                assert torch.equal(values, expected[kind, start:end]), (turn, number, name)
                values.uniform_()
                expected[kind, start:end] = values
            own.put(number)
        if turn == 1:
            own.stay(2)
    own.write_out()
    assert torch.equal(own.mapped("m", 1000, 4500), expected[1, 1000:4500])
    # One turn writes all, but for the two that stay; the first turn has nothing to read.
    record = 2 * 1024 * 4
    moved = own.meter.snapshot()
    assert moved.read_bytes == (5 + 5 + 3) * record
    assert moved.written_bytes == (5 + 5 + 3 + 3 + 2) * record
    assert own.pool.num_bytes == (3 + 2) * record
    assert sum(file.num_bytes for file in own.files.values()) == 5 * record
    own.close()
    assert not list(tmp_path.iterdir())


def test_the_first_record_is_read_before_it_is_asked_for_and_only_once(tmp_path: Path) -> None:
    own = shelf(tmp_path)
    for number in own.each():
        own.take(number)["m"].fill_(number)
        own.put(number)
    own.flush()
    own.begin()
    # Reads follow one another on one thread.
    own._reader.submit(int).result()
    assert own.meter.snapshot().read_bytes == 2 * 1024 * 4
    for number in own.each():
        assert bool((own.take(number)["m"] == number).all())
        own.leave(number)
    assert own.meter.snapshot().read_bytes == 5 * 2 * 1024 * 4
    own.close()


@pytest.mark.parametrize("codec", [Integer(8, 64), Integer(4, 128, scale="bf16"), Integer(3, 1024)], ids=str)
def test_coded_numbers_are_rounded_alike_wherever_they_lie(tmp_path: Path, codec: Integer) -> None:
    coding = {"master": PLAIN, "m": Coding(codec), "v": Coding(codec, of_roots=True)}
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 5000, generator=generator)
    values[2] = values[2].square() * torch.logspace(-12, 0, 5000)
    values[:, ::7] = 0.0
    told = []
    for record_numel, staying in ((1024, 0), (2048, 1), (5000, 9)):
        own = Shelf(tmp_path, coding, 5000, record_numel, TierMeter(), Pace(None))
        own.stay(staying)
        for _ in range(2):
            for number in own.each():
                start, end = own.span(number)
                for one, tensor in zip(values, own.take(number).values(), strict=True):
                    tensor.copy_(one[start:end])
                own.put(number)
        own.write_out()
        told.append({kind: own.mapped(kind, 0, 5000).clone() for kind in coding})
        for number in own.each():
            start, end = own.span(number)
            for kind, tensor in own.take(number).items():
                assert torch.equal(tensor, told[-1][kind][start:end]), kind
            own.leave(number)
        own.close()
    for kind in coding:
        assert torch.equal(told[0][kind], told[1][kind]) and torch.equal(told[0][kind], told[2][kind])
    assert torch.equal(told[0]["master"], values[0])
    for kind, exact in (("m", values[1]), ("v", values[2].sqrt())):
        found = told[0][kind] if kind == "m" else told[0][kind].sqrt()
        largest = F.pad(exact, (0, 120)).view(-1, codec.group).abs().amax(1)
        step = largest.repeat_interleave(codec.group)[:5000] / codec.levels
        # A small root is raised to a little more than a step, which may be rounded up.
        most = 1.01 if kind == "m" else 2.01
        assert ((found - exact).abs() <= most * step + 1e-12).all(), kind
        assert torch.equal(found == 0, exact == 0) if kind == "v" else not found[exact == 0].any()


def test_coded_numbers_have_no_bias(tmp_path: Path) -> None:
    own = Shelf(tmp_path, {"m": Coding(Integer(8, 64))}, 1024, 1024, TierMeter(), Pace(None))
    values, total = torch.randn(1024, generator=torch.Generator().manual_seed(1)), torch.zeros(1024)
    for _ in range(400):
        own.take(0)["m"].copy_(values)
        own.put(0)
        total += own.take(0)["m"]
        own.leave(0)
    # Steps of about 3/127, each draw within one: the mean of 400 within five deviations.
    assert (total / 400 - values).abs().max() < 5 * 0.5 * (4 / 127) / 20
    own.close()


def test_small_steps_of_rounded_masters_add_up(tmp_path: Path) -> None:
    """Each moves a number by a twentieth of what a level is: rounding to the nearest would lose all of them."""
    own, level, steps = (
        Shelf(tmp_path, {"master": Coding(Integer(8, 64))}, 4096, 4096, TierMeter(), Pace(None)),
        1 / 127,
        100,
    )
    sent, largest = torch.zeros(4096), torch.arange(0, 4096, 64)
    for _ in range(steps):
        values = own.take(0)["master"]
        assert torch.equal(values, sent)
        values += level / 20
        values[largest] = 1.0
        own.settle(0, "master")
        sent = values.clone()
        own.put(0, ())
    moved = sent[torch.arange(4096) % 64 != 0].mean() / level
    # A number is up to sqrt(100) / 2 levels off, 4,000 of them a twelfth of one: within five deviations.
    assert moved == pytest.approx(steps / 20, abs=5 * 0.5 * 10 / 63)
    own.close()


def test_numbers_in_bf16_have_no_bias_and_are_rounded_alike_at_any_cut() -> None:
    """Also where they are less than half of the least step from what they were: nearest rounding would lose them."""
    coding, values = Coding(Cast("bf16")), torch.randn(1024, generator=torch.Generator().manual_seed(1)).exp()
    values[:4] = torch.tensor([0.0, torch.inf, torch.nan, 1 + 2**-12])
    total, packet, found = torch.zeros(1024), torch.empty(2048, dtype=torch.uint8), torch.empty(1024)
    for seed in range(400):
        coding.encode(values.clone(), packet, seed=seed, counter=7)
        coding.decode(packet, found)
        total += found
    # Steps of 2^-7 of a number at most: the mean of 400 draws within five deviations.
    bound = 5 * 0.5 * 2**-7 / 20
    assert bool(((total / 400 - values)[3:].abs() < bound * values[3:]).all()) and total[0] == 0
    assert total[1] == torch.inf and bool(total[2].isnan())
    parts = torch.empty(2048, dtype=torch.uint8)
    for first in (0, 512):
        own = slice(2 * first, 2 * first + 1024)
        coding.encode(values[first : first + 512].clone(), parts[own], seed=399, counter=7 + first)
    assert torch.equal(parts, packet)


def test_what_the_disk_gives_back_is_compared(tmp_path: Path) -> None:
    own = shelf(tmp_path, 1000)
    own.take(0)["m"].fill_(1.0)
    own.put(0)
    own.flush()
    slot = own.pool.take()
    own.files["m"].write(0, slot[:BLOCK_BYTES].zero_())
    own.pool.give_back(slot)
    with pytest.raises(ThinwireError, match="record 0 of m is not what was written"):
        own.take(0)


def test_a_disk_that_fails_is_named_with_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost write is told by the next one and by a read; half a write is finished; a read of nothing is an end."""
    shelf, other = (Shelf(tmp_path, {"a": PLAIN}, 4096, 2048, TierMeter(), Pace()) for _ in range(2))
    written, write = list[int](), os.pwritev

    def halves(file: int, views: list[memoryview], place: int) -> int:
        written.append(write(file, [views[0][:BLOCK_BYTES]], place))
        return written[-1]

    def full(file: int, views: list[memoryview], place: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def put(shelf: Shelf, value: float) -> None:
        for record in shelf.each():
            shelf.take(record)["a"].fill_(value)
            shelf.put(record)
        shelf.flush()

    put(other, 1.0)
    monkeypatch.setattr(os, "pwritev", halves)
    put(shelf, 1.0)
    assert written == [BLOCK_BYTES] * 4
    monkeypatch.setattr(os, "pwritev", full)
    for lose in (partial(put, shelf, 2.0), shelf.flush, partial(shelf.take, 0)):
        with pytest.raises(ThinwireError, match="8192 bytes can't be written to it: No space left on device"):
            lose()
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(ThinwireError, match="8192 bytes can't be read from it: the file ends here"):
        other.take(0)


def test_a_folder_in_memory_and_a_full_disk_are_refused(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs here")
    with pytest.raises(ConfigError, match="tmpfs, which is memory and not a disk"):
        check_folder(Path("/dev/shm/thinwire"), 1)
    with pytest.raises(ConfigError, match=r"^store /proc/x: no folder can be made in /proc: .*; nearest: /"):
        check_folder(Path("/proc/x"), 0)
    with pytest.raises(ConfigError, match="nearest: a folder on another disk"):
        check_folder(tmp_path, 10**16)


def test_a_rate_holds_reads_and_writes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    monkeypatch.setattr("thinwire.tiers.file.time.monotonic", lambda: now[0])
    monkeypatch.setattr("thinwire.tiers.file.time.sleep", slept.append)
    pace = Pace(1000.0)
    pace.keep(500, 100.0)
    pace.keep(250, 100.0)
    assert slept == [0.5, 0.75]
