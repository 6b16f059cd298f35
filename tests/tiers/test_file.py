"""A file on a disk, where the file system knows no files without a name."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.tiers import BLOCK_BYTES, DiskFile, Pace, TierMeter
from thinwire.tiers.pool import pages


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.EPERM])
def test_a_file_that_must_have_a_name_loses_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    opened, refused = os.open, []

    def open_named(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refused.append(path)
            raise OSError(code, os.strerror(code))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", open_named)
    file = DiskFile(tmp_path, 2 * BLOCK_BYTES, TierMeter(), Pace(None))
    assert refused and not list(tmp_path.iterdir())
    written, read = pages(BLOCK_BYTES), pages(BLOCK_BYTES)
    written.copy_(torch.arange(BLOCK_BYTES) % 251)
    file.write(BLOCK_BYTES, written)
    file.read(BLOCK_BYTES, read)
    assert torch.equal(read, written)
