from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, first_few

log = logging.getLogger(__name__)

STDLIB_EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SNIFF_BYTES = 8192
FEW = 5  # names that a message lists
ALIKE = 0.75  # least likeness of two names, of which one may be meant for the other
DOCUMENT_CHARS = 16 * 2**20  # a larger text file is cut at line ends, so that memory stays bounded


@dataclass(frozen=True)
class TextSource:
    """A source of documents: files below `root`, or a Hugging Face dataset (`hf:NAME`, no files)."""

    spec: str
    root: Path
    files: tuple[Path, ...]
    text_field: str = "text"

    @property
    def streams(self) -> bool:
        """Whether the documents come from the network, without a known end."""
        return self.spec.startswith("hf:")

    def describe(self) -> list[Any]:
        """Identity of the content: the spec, and path, bytes and modification time of each file."""
        if self.streams:
            return [self.spec, self.text_field]
        stats = [(p.relative_to(self.root).as_posix(), p.stat()) for p in self.files]
        return [str(self.root), self.text_field, [(name, s.st_size, s.st_mtime_ns) for name, s in stats]]

    def documents(self) -> Iterator[str]:
        """Yield the texts in the order of `files`. Files of a folder that are not text are skipped with a warning."""
        if self.streams:
            yield from read_hf(self.spec.removeprefix("hf:"), self.text_field)
            return
        skipped: list[str] = []
        num_documents = 0
        for path in self.files:
            try:
                for text in read_file(path, self.text_field):
                    num_documents += 1
                    yield text
            except NotTextError as error:
                if len(self.files) == 1:
                    raise
                skipped.append(str(error))
        if skipped:
            log.warning(
                "data %r: skipped %d file(s) that are not text: %s", self.spec, len(skipped), first_few(skipped)
            )
        if not num_documents:
            raise ConfigError(f"data {self.spec!r}: holds no text")


class NotTextError(ConfigError):
    """A file is not UTF-8 text."""


def open_source(spec: str, text_field: str = "text") -> TextSource:
    """Find the source `spec`: "stdlib", a file, a folder, or `hf:NAME`. ConfigError if it is missing or empty.

    Files of a folder are ordered by a hash of their relative paths. The order is the same on every machine, and mixed,
    so that the end of the stream (the held-out split) represents the whole.
    """
    path = place_of(spec)
    if path is None:
        return TextSource(spec, Path(), (), text_field)
    if path.is_file():
        files = [path] if path.stat().st_size or states_no_size(path) else []
        root = path.parent
    elif not path.is_dir():
        raise ConfigError(f"data {spec!r}: is neither a file nor a folder; copy its text into a file")
    else:
        root = path
        files = stdlib_files(root) if spec == "stdlib" else folder_files(root)
        files.sort(key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())
    if not files:
        raise ConfigError(f"data {spec!r}: is empty; give a file or a folder that holds text, or 'stdlib'")
    return TextSource(spec, root, tuple(files), text_field)


def place_of(spec: str) -> Path | None:
    """The file or folder that a source names; None for a dataset of the network. ConfigError if there is none."""
    if spec.startswith("hf:"):
        return None
    if not spec:
        raise ConfigError("data '': give 'stdlib', a file, a folder, or hf:NAME")
    path = Path(sysconfig.get_path("stdlib")) if spec == "stdlib" else Path(spec).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"data {spec!r}: no such file or folder{nearest_sibling(path, spec)}")
    return path


def states_no_size(path: Path) -> bool:
    """False for an empty file. Raises ConfigError for other files of size 0, such as the kernel's files below /proc."""
    try:
        with path.open("rb") as file:
            if not file.read(1):
                return False
        reason = "its stated size is 0 but it has content, like the kernel's own files"
    except OSError as error:
        reason = f"it states a size of 0 and cannot be read: {error.strerror}"
    raise ConfigError(f"data {str(path)!r}: {reason}; copy its text into a file")


def documents(spec: str, text_field: str = "text") -> Iterator[str]:
    """Yield the documents of the source `spec`, one string each; see `open_source` for the form of `spec`.

    A file ending in .jsonl or .parquet holds one document per row in `text_field`; any other file is UTF-8 text.
    Raises ConfigError for a path that is missing, empty, binary or unreadable, or for a row without the field.
    """
    yield from open_source(spec, text_field).documents()


def stdlib_files(root: Path) -> list[Path]:
    """The running Python's standard library, without its tests."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - STDLIB_EXCLUDED
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return files


def folder_files(root: Path) -> list[Path]:
    """Every file below `root` that is not empty. Hidden files are left out with a message."""
    files, num_hidden = [], 0
    for path in root.rglob("*"):
        if not path.is_file() or not path.stat().st_size:
            continue
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            num_hidden += 1
        else:
            files.append(path)
    if num_hidden:
        log.warning("data %r: left out %d hidden files", str(root), num_hidden)
    return files


def nearest_sibling(path: Path, spec: str) -> str:
    """Tail of an error message about a missing path: the closest name beside it that has text, or the missing folder.

    spec: the path as stated; after a / at its end, only folders are meant.
    """
    if not path.parent.is_dir():
        return f"; folder {str(path.parent)!r} does not exist either"
    try:
        beside = sorted(p.name for p in path.parent.iterdir() if not spec.endswith("/") or p.is_dir())
    except OSError as error:
        return f"; {str(path.parent)!r} cannot be listed: {error.strerror}"
    close = difflib.get_close_matches(path.name, ["stdlib", *beside], n=FEW, cutoff=ALIKE)
    close = [name for name in close if name == "stdlib" or could_serve(path.parent / name)]
    if not close and path.parent == path.parent.parent:
        # Don't suggest folders of the system.
        return ""
    if not close and len(beside) > FEW:
        return f"; none of the {len(beside)} names in {str(path.parent)!r} is like it"
    if not close:
        return f"; {str(path.parent)!r} holds {', '.join(beside) or 'nothing'}"
    return f"; did you mean {'stdlib' if close[0] == 'stdlib' else str(Path(spec).parent / close[0])!r}?"


def could_serve(path: Path) -> bool:
    """Whether a path may hold text: a file that is not empty, or a folder with one; hidden ones don't count."""
    files = (one for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file() and one.stat().st_size)
    return any(not any(part.startswith(".") for part in one.relative_to(path.parent).parts) for one in files)


def read_file(path: Path, text_field: str) -> Iterator[str]:
    """The documents of one file, read by the suffix of its name."""
    try:
        if path.suffix == ".parquet":
            yield from read_parquet(path, text_field)
        elif path.suffix == ".jsonl":
            yield from read_jsonl(path, text_field)
        else:
            yield from read_text(path)
    except UnicodeDecodeError:
        raise NotTextError(f"data {str(path)!r}: is not UTF-8 text; convert it, or leave it out") from None
    except OSError as error:
        raise ConfigError(f"data {str(path)!r}: cannot be read: {error.strerror or error}") from error


def read_text(path: Path) -> Iterator[str]:
    """The file as one document, or cut at line ends if it is longer than DOCUMENT_CHARS."""
    with path.open("rb") as file:
        if b"\0" in file.read(SNIFF_BYTES):
            raise NotTextError(f"data {str(path)!r}: is a binary file, not text")
    with path.open(encoding="utf-8-sig", newline="") as file:
        while lines := file.readlines(DOCUMENT_CHARS):
            yield "".join(lines)


def read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    """One document per line, a JSON object with the text in `text_field`. Blank lines are skipped."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"data {str(path)!r}, line {number}: is not JSON: {error}") from None
            yield text_of(row, text_field, f"data {str(path)!r}, line {number}")


def read_parquet(path: Path, text_field: str) -> Iterator[str]:
    """One document per row of the column `text_field`; rows are read in batches."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"data {str(path)!r}: needs pyarrow; pip install -e '.[hf]' in thinwire's folder") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_field(file.schema_arrow.names, text_field, f"data {str(path)!r}")
            for batch in file.iter_batches(columns=[text_field]):
                for row in batch.to_pylist():
                    yield text_of(row, text_field, f"data {str(path)!r}")
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"data {str(path)!r}: is not a parquet file: {error}") from None


def read_hf(name: str, text_field: str) -> Iterator[str]:
    """Stream the train split of a dataset: NAME, or NAME:CONFIG if the dataset has several."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data hf:{name}: needs datasets; pip install -e '.[hf]' in thinwire's folder") from None
    path, _, config = name.partition(":")
    if not path:
        raise ConfigError(f"data hf:{name}: give the name of a dataset, hf:NAME or hf:NAME:CONFIG")
    try:
        for row in datasets.load_dataset(path, config or None, split="train", streaming=True):
            yield text_of(row, text_field, f"data hf:{name}")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"data hf:{name}: datasets cannot read it: {error}") from error


def text_of(row: Any, text_field: str, where: str) -> str:
    """The text of a row; ConfigError names the fields seen if there is none."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a row must be an object with a field {text_field!r}, not {type(row).__name__}")
    check_field(list(row), text_field, where)
    text = row[text_field]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: field {text_field!r} must hold a string, not {type(text).__name__}")
    return text


def check_field(names: list[str], text_field: str, where: str) -> None:
    """ConfigError if a row with these field names has no `text_field`."""
    if text_field not in names:
        raise ConfigError(f"{where}: no field {text_field!r}; the fields are {', '.join(names) or 'none'}")
