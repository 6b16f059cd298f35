"""Which file system a folder lies on, by the kernel's list."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.errors import ConfigError
from thinwire.tiers import mount


def test_a_mount_is_found_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "größere \\ Platte"
    folder.mkdir()
    written = str(folder).replace("\\", "\\134").replace(" ", "\\040")
    listed = tmp_path / "mountinfo"
    listed.write_text(f"1 0 0:1 / / rw - ext4 /dev/sda rw\n2 1 0:2 / {written} rw - tmpfs none rw\n", "utf-8")
    monkeypatch.setattr(mount, "MOUNTS", listed)
    assert mount.mount_type(tmp_path) == "ext4" and mount.mount_type(folder / "below") == "tmpfs"
    with pytest.raises(ConfigError, match="lies on tmpfs, which is memory"):
        mount.check_folder(folder, 0)
    monkeypatch.setattr(mount.tempfile, "tempdir", str(folder))
    monkeypatch.chdir(tmp_path)
    assert not mount.disk_folder().is_relative_to(folder)
