from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.data import documents, sources
from thinwire.data.sources import open_source
from thinwire.errors import ConfigError


def fill(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_the_standard_library_is_found_without_its_tests() -> None:
    source = open_source("stdlib")
    names = {p.relative_to(source.root).as_posix() for p in source.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not [n for n in names if "test" in n.split("/") or "site-packages" in n or not n.endswith(".py")]
    assert source == open_source("stdlib")
    assert len(next(source.documents())) > 0


def test_a_file_is_one_document_and_keeps_its_line_ends(tmp_path: Path) -> None:
    fill(tmp_path, a_txt="\ufeffgrüße\r\nzwei\n")
    assert list(documents(str(tmp_path / "a.txt"))) == ["grüße\r\nzwei\n"]


def test_a_large_file_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DOCUMENT_CHARS", 10)
    lines = [f"line {i}\n" for i in range(9)]
    fill(tmp_path, a_txt="".join(lines))
    pieces = list(documents(str(tmp_path / "a.txt")))
    assert len(pieces) > 2
    assert "".join(pieces) == "".join(lines)
    assert all(piece.endswith("\n") for piece in pieces)


def test_a_folder_gives_every_text_in_an_order_of_its_names_alone(tmp_path: Path) -> None:
    texts = {f"f{i}_py": f"text {i}" for i in range(12)}
    fill(tmp_path / "one", **texts, sub__g_md="deep")
    fill(tmp_path / "two", sub__g_md="deep", **dict(reversed(texts.items())))
    found = list(documents(str(tmp_path / "one")))
    assert sorted(found) == sorted([*texts.values(), "deep"])
    assert found == list(documents(str(tmp_path / "two")))
    names = [path.name for path in open_source(str(tmp_path / "one")).files]
    assert names[:4] == ["f5.py", "f2.py", "f3.py", "f0.py"]  # by hash: mixed, and the same everywhere


def test_what_is_not_text_in_a_folder_is_skipped_and_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, a_txt="good", b_png=b"\x89PNG\0\0", c_txt=b"caf\xe9", d_txt="")
    fill(tmp_path / ".git", config="hidden")
    assert list(documents(str(tmp_path))) == ["good"]
    assert "skipped 2 file(s) that are not text" in caplog.text
    assert "b.png" in caplog.text and "c.txt" in caplog.text
    assert "left out 1 hidden files" in caplog.text


def test_rows_of_jsonl_and_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": "eins", "n": 1, "body": "x"}, {"text": "zwei", "n": 2, "body": "y"}]
    fill(tmp_path, a_jsonl="\n".join(map(json.dumps, rows)) + "\n\n")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        assert list(documents(str(tmp_path / name))) == ["eins", "zwei"]
        assert list(documents(str(tmp_path / name), "body")) == ["x", "y"]
        with pytest.raises(ConfigError, match="no field 'txt'; the fields are text, n, body"):
            list(documents(str(tmp_path / name), "txt"))
        with pytest.raises(ConfigError, match="field 'n' must hold a string, not int"):
            list(documents(str(tmp_path / name), "n"))
    assert sorted(documents(str(tmp_path))) == ["eins", "eins", "zwei", "zwei"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2: is not JSON"),
        ("a.jsonl", b"[1]\n", "must be an object with a field 'text', not list"),
        ("a.parquet", b"nonsense", "is not a parquet file"),
        ("a.bin", b"ab\0cd", "is a binary file"),
        ("a.txt", b"caf\xe9 noir", "is not UTF-8 text"),
        ("a.txt", b"", "is empty"),
        ("a.jsonl", b"\n\n", "holds no text"),
    ],
)
def test_a_bad_file_is_named_with_the_reason(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        list(documents(str(tmp_path / name)))
    assert name in str(error.value)


def test_a_missing_path_names_its_nearest_sibling(tmp_path: Path) -> None:
    fill(tmp_path, corpus_txt="x", other_md="y")
    with pytest.raises(ConfigError, match=r"did you mean '.*corpus.txt'"):
        list(documents(str(tmp_path / "corpsu.txt")))
    (tmp_path / "nodes.txt").write_text("z")
    with pytest.raises(ConfigError, match=r"holds nothing$"):
        list(documents(f"{tmp_path}/nots/"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/.hidden").write_text("z")
    with pytest.raises(ConfigError, match=r"holds notes$"):
        list(documents(f"{tmp_path}/nots/"))
    (tmp_path / "notes/today.txt").write_text("z")
    with pytest.raises(ConfigError, match=r"did you mean '.*notes'"):
        list(documents(f"{tmp_path}/nots/"))
    with pytest.raises(ConfigError, match=r"holds corpus.txt, nodes.txt, notes, other.md"):
        list(documents(str(tmp_path / "zzz")))
    with pytest.raises(ConfigError, match=r"folder '.*nowhere' does not exist either"):
        list(documents(str(tmp_path / "nowhere" / "corpus.txt")))
    with pytest.raises(ConfigError, match="give 'stdlib'"):
        list(documents(""))
    with pytest.raises(ConfigError, match="did you mean 'stdlib'"):
        list(documents("stdlb"))


def test_a_folder_of_another_name_is_not_suggested(tmp_path: Path) -> None:
    fill(tmp_path, tests__a_py="x")
    with pytest.raises(ConfigError, match=r"; '.*' holds tests$"):
        list(documents(f"{tmp_path}/notes/"))
    (tmp_path / "notes").mkdir()
    with pytest.raises(ConfigError, match=r"is empty; give a file or a folder that holds text, or 'stdlib'$"):
        list(documents(f"{tmp_path}/notes/"))


def test_what_is_no_ordinary_file_is_said(tmp_path: Path) -> None:
    for path, message in (
        ("/proc/self/mem", "states a size of 0 and cannot be read: Input/output error; copy its text"),
        ("/proc/self/status", "its stated size is 0 but it has content"),
        ("/dev/null", "is neither a file nor a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_source(path)


def test_a_missing_path_of_the_system_lists_no_folders_of_it() -> None:
    with pytest.raises(ConfigError) as caught:
        open_source("/nonexistent-qqq")
    assert str(caught.value) == "data '/nonexistent-qqq': no such file or folder"


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        list(documents(str(tmp_path)))
    fill(tmp_path, a_bin=b"\0", b_bin=b"\0")
    with pytest.raises(ConfigError, match="holds no text"):
        list(documents(str(tmp_path)))


def test_a_dataset_is_streamed_by_name_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        if path == "gone":
            raise FileNotFoundError("no dataset 'gone'")
        assert (split, streaming) == ("train", True)
        yield {"text": f"{path} {config}"}
        if path == "cut":
            raise ConnectionError("the network went away")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(documents("hf:owner/name")) == ["owner/name None"]
    assert list(documents("hf:owner/name:de")) == ["owner/name de"]
    with pytest.raises(ConfigError, match="no field 'body'; the fields are text"):
        list(documents("hf:owner/name", "body"))
    with pytest.raises(ConfigError, match="no dataset 'gone'"):
        list(documents("hf:gone"))
    with pytest.raises(ConfigError, match="datasets cannot read it: the network went away"):
        list(documents("hf:cut"))
    with pytest.raises(ConfigError, match="give the name of a dataset"):
        list(documents("hf:"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[hf\]'"):
        list(documents("hf:owner/name"))
