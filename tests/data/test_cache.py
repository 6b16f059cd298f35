from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.workers import CONTEXT
from thinwire.data import ByteTokenizer, TokenFile, cache, documents, prepare
from thinwire.data.sources import TextSource
from thinwire.errors import ConfigError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.txt").write_text(f"document {i}\n" * (i + 1))
    return folder


class CountingTokenizer(ByteTokenizer):
    calls = 0

    def encode(self, text: str) -> np.ndarray:
        type(self).calls += 1
        return super().encode(text)


class WideTokenizer(ByteTokenizer):
    vocab_size = 70_000
    end_of_document: int | None = 69_999
    fingerprint = "wide"


def test_tokens_are_the_documents_each_with_its_end(texts: Path, tmp_path: Path) -> None:
    file = prepare(str(texts), ByteTokenizer(), cache_dir=tmp_path / "cache")
    expected = b"".join(text.encode() + b"\xff" for text in documents(str(texts)))
    assert file.tokens.tobytes() == expected
    assert (file.info.num_tokens, file.info.num_documents, file.info.dtype) == (len(expected), 5, "uint8")
    assert not file.tokens.flags.writeable


def test_the_second_time_nothing_is_tokenised(texts: Path, tmp_path: Path) -> None:
    CountingTokenizer.calls = 0
    first = prepare(str(texts), CountingTokenizer(), cache_dir=tmp_path / "cache")
    assert CountingTokenizer.calls == 5
    again = prepare(str(texts), CountingTokenizer(), cache_dir=tmp_path / "cache")
    assert CountingTokenizer.calls == 5
    assert first.path == again.path and np.array_equal(first.tokens, again.tokens)
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".bin", ".json"]


def test_what_changes_the_tokens_changes_the_key(texts: Path, tmp_path: Path) -> None:
    def key(limit_tokens: int | None = None) -> Path:
        return prepare(str(texts), ByteTokenizer(), cache_dir=tmp_path / "cache", limit_tokens=limit_tokens).path

    paths = [key(), key(limit_tokens=7)]
    paths.append(prepare(str(texts), WideTokenizer(), cache_dir=tmp_path / "cache").path)
    (texts / "5.txt").write_text("more")
    paths.append(key())
    os.utime(texts / "5.txt", ns=(1, 1))
    paths.append(key())
    assert len(set(paths)) == 5


def test_wide_vocabularies_and_limits(texts: Path, tmp_path: Path) -> None:
    wide = prepare(str(texts), WideTokenizer(), cache_dir=tmp_path)
    assert wide.tokens.dtype == np.uint32
    assert np.count_nonzero(wide.tokens == 69_999) == 5
    short = prepare(str(texts), WideTokenizer(), cache_dir=tmp_path, limit_tokens=20)
    assert np.array_equal(short.tokens, wide.tokens[:20])


def test_the_digest_is_of_the_content_alone(texts: Path, tmp_path: Path) -> None:
    first = prepare(str(texts), ByteTokenizer(), cache_dir=tmp_path / "cache").info.digest
    moved = texts.rename(tmp_path / "elsewhere")
    assert prepare(str(moved), ByteTokenizer(), cache_dir=tmp_path / "cache").info.digest == first
    (moved / "0.txt").write_text("Document 0\n")
    assert prepare(str(moved), ByteTokenizer(), cache_dir=tmp_path / "cache").info.digest != first


@pytest.mark.parametrize("damage", ["short", "sidecar"])
def test_a_damaged_cache_is_announced_and_made_again(
    texts: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = prepare(str(texts), ByteTokenizer(), cache_dir=tmp_path / "cache")
    expected = np.array(file.tokens)
    damaged = file.path if damage == "short" else file.path.with_suffix(".json")
    damaged.unlink()
    damaged.write_bytes(b"xyz")
    assert np.array_equal(prepare(str(texts), ByteTokenizer(), cache_dir=tmp_path / "cache").tokens, expected)
    assert "is damaged" in caplog.text


def test_a_failure_leaves_nothing_behind(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: TextSource) -> Iterator[str]:
        yield "x" * 2**21
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TextSource, "documents", fail)
    with pytest.raises(ConfigError, match="cannot write: No space left on device"):
        prepare(str(texts), ByteTokenizer(), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_unwritable_folder_is_announced_and_replaced(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    file = prepare(str(texts), ByteTokenizer(), cache_dir=tmp_path / "file" / "cache")
    assert file.path.parent == tmp_path / f"thinwire-{os.getuid()}"
    assert "cannot be written to (Not a directory)" in caplog.text


def test_the_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / "thinwire"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path / ".cache" / "thinwire"


def digest_of(texts: str, folder: str) -> str:
    file = prepare(texts, ByteTokenizer(), cache_dir=Path(folder))
    return f"{file.info.digest} {len(file.tokens)} {int(file.tokens.sum())}"


def test_processes_that_race_all_see_the_whole(texts: Path, tmp_path: Path) -> None:
    with CONTEXT.Pool(4) as pool:
        results = pool.starmap(digest_of, [(str(texts), str(tmp_path / "cache"))] * 8)
    assert len(set(results)) == 1
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".bin", ".json"]


def test_a_stream_is_limited_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def endless(_: TextSource) -> Iterator[str]:
        while True:
            yield "again and again " * 1000

    monkeypatch.setattr(TextSource, "documents", endless)
    monkeypatch.setattr(cache, "STREAM_LIMIT_TOKENS", 50_000)
    file = prepare("hf:some/name", ByteTokenizer(), cache_dir=tmp_path)
    assert len(file.tokens) == 50_000
    assert "the first 50000 tokens are kept" in caplog.text


def token_file(num_tokens: int) -> TokenFile:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    return TokenFile(Path("x"), "x", tokens, cache.TokenInfo(num_tokens, 1, "uint16", ""))


def test_the_split_keeps_the_tail_apart() -> None:
    train, heldout = token_file(10_000).split(seq_len=8)
    assert (len(train), len(heldout)) == (9900, 100)
    assert np.array_equal(np.concatenate((train, heldout)), np.arange(10_000))
    assert len(token_file(100).split(seq_len=8)[1]) == 9  # one sequence at least


@pytest.mark.parametrize(("num_tokens", "fits"), [(18, True), (17, False), (3, False)])
def test_data_shorter_than_its_sequences_is_refused(num_tokens: int, fits: bool) -> None:
    if fits:
        token_file(num_tokens).split(seq_len=8)
        return
    near = "--seq-len 7, or more text" if num_tokens == 17 else "more text, or --data stdlib"
    with pytest.raises(ConfigError, match=f"has {num_tokens} tokens, and --seq-len 8 needs at least 18: .*: {near}$"):
        token_file(num_tokens).split(seq_len=8)
    if num_tokens == 17:
        token_file(num_tokens).split(seq_len=7)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0])
def test_a_held_out_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="must lie between 0 and 1"):
        token_file(1000).split(seq_len=8, heldout_fraction=fraction)


def test_without_any_writable_folder_both_are_named(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cache cannot be written to \(Not a directory\), nor .*thinwire-"):
        prepare(str(texts), ByteTokenizer(), cache_dir=tmp_path / "file" / "cache")


def test_no_tokens_at_all_are_refused(tmp_path: Path) -> None:
    class NoEndTokenizer(ByteTokenizer):
        end_of_document: int | None = None

    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ConfigError, match="holds no text"):
        prepare(str(tmp_path / "a.jsonl"), NoEndTokenizer(), cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="limit_tokens=0"):
        prepare(str(tmp_path / "a.jsonl"), ByteTokenizer(), cache_dir=tmp_path, limit_tokens=0)
