"""What `thinwire calibrate` refuses before any process starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from thinwire.errors import ConfigError
from thinwire.launch import calibrate


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--join foo --nodes 2", r"--join foo: must be HOST:PORT, such as 192\.168\.1\.10:29500"),
        ("--join foo:99999 --nodes 2", "--join foo:99999: must be HOST:PORT"),
        ("--timeout 0", "--timeout 0.0: must be above 0"),
        ("--timeout -1", "--timeout -1.0: must be above 0"),
        ("--timeout 1e300", "--timeout 1e\\+300: must be at most 31,536,000; nearest: 31536000"),
        ("--timeout nan", "--timeout nan: must be finite"),
        ("--workers 0", "--workers 0: must be at least 1; nearest: 1"),
        ("--nodes 2", "--nodes 2 needs --join HOST:PORT"),
        ("--node 1", "--node 1: nodes are numbered 0 to 0; nearest: 0"),
        ("--workers 2 --local-size 3", "local size 3 does not fit a world of 2: .* nearest that does: 2"),
        ("--out .", r"--out \.: is a folder; nearest: --out machine\.json"),
    ],
)
def test_what_can_not_work_starts_no_process(
    flags: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(calibrate, "start_ranks", lambda *_: 0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=told) as caught:
        calibrate.run_calibrate(["--models", "tiny", *flags.split()])
    assert len(caught.value.problems) == 1


def test_a_rank_of_node_0_finds_its_own_port_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibrate, "start_ranks", lambda *_: 7)
    monkeypatch.setattr(calibrate, "measure", lambda *_: 8)
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("", 0)) as taken:
        line = ["--join", f"127.0.0.1:{taken.getsockname()[1]}", "--nodes", "2", "--local-size", "2"]
        monkeypatch.delenv("RANK", raising=False)
        with pytest.raises(ConfigError, match="is in use on this machine"):
            calibrate.run_calibrate(line)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert calibrate.run_calibrate(line) == 8
