"""A copy of this process does the work, and what it does to memory stays there."""

from __future__ import annotations

from pathlib import Path

from thinwire.launch.apart import apart


def test_files_stay_and_memory_does_not(tmp_path: Path) -> None:
    seen = []

    def work() -> None:
        seen.append(1)
        (tmp_path / "made").write_text("there")

    assert apart(work) and not seen and (tmp_path / "made").read_text() == "there"
    assert not apart(lambda: 1 / 0)
