from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from thinwire.data.sources import TextSource, open_source
from thinwire.data.tokenizers import Tokenizer
from thinwire.errors import ConfigError, counted

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
STREAM_LIMIT_TOKENS = 50_000_000
BATCH_CHARS = 2**20


@dataclass(frozen=True)
class TokenInfo:
    """The sidecar of a token file. `digest` is the SHA-256 of the tokens, equal on machines that hold the same data."""

    num_tokens: int
    num_documents: int
    dtype: str
    digest: str


@dataclass(frozen=True)
class TokenFile:
    """Tokens of a source in a memory-mapped file: `tokens` is read-only, uint8, uint16 or uint32 [num_tokens]."""

    path: Path
    source: str
    tokens: np.ndarray
    info: TokenInfo

    def split(self, seq_len: int, heldout_fraction: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
        """Views (train, heldout); the held-out tokens are the last ones, at least one sequence (seq_len + 1 tokens).

        Raises ConfigError if the fraction is not inside (0, 1) or either part is shorter than one sequence.
        """
        if not 0 < heldout_fraction < 1:
            raise ConfigError(f"heldout_fraction={heldout_fraction}: must lie between 0 and 1; the default is 0.01")
        num_tokens = len(self.tokens)
        num_heldout = max(round(num_tokens * heldout_fraction), seq_len + 1)
        if num_tokens - num_heldout < seq_len + 1:
            longest = num_tokens // 2 - 1
            near = f"--seq-len {longest}, or more text" if longest > 0 else "more text, or --data stdlib"
            raise ConfigError(
                f"data {self.source!r}: has {counted(num_tokens, 'token')}, and --seq-len {seq_len} needs at least "
                f"{2 * (seq_len + 1)}: a sequence to train on and one held out, of {seq_len + 1} each; nearest: {near}"
            )
        return self.tokens[:-num_heldout], self.tokens[-num_heldout:]


def prepare(
    spec: str,
    tokenizer: Tokenizer,
    *,
    text_field: str = "text",
    cache_dir: Path | None = None,
    limit_tokens: int | None = None,
) -> TokenFile:
    """Tokenise the source `spec` once, and later open the result from the cache (default ~/.cache/thinwire).

    The key covers the tokenizer, the limit, and the names, sizes and times of the files. Files are written under
    another name and then renamed, so processes may race: each sees a whole file, and all write the same content. At
    most `limit_tokens` are kept; by default all, or STREAM_LIMIT_TOKENS of an `hf:` dataset. Raises ConfigError for a
    source that cannot be read, and for a full disk.
    """
    if limit_tokens is not None and limit_tokens < 1:
        raise ConfigError(f"limit_tokens={limit_tokens}: must be at least 1")
    source = open_source(spec, text_field)
    if source.streams and limit_tokens is None:
        limit_tokens = STREAM_LIMIT_TOKENS
        log.warning("data %r: streams without end; the first %d tokens are kept", spec, limit_tokens)
    identity = [FORMAT_VERSION, source.describe(), tokenizer.fingerprint, limit_tokens]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    path = writable(cache_dir or default_cache_dir()) / f"{key}.bin"
    info = read_info(path)
    if info is None:
        try:
            info = write(path, source, tokenizer, limit_tokens)
        except OSError as error:
            raise ConfigError(f"token cache {str(path.parent)!r}: cannot write: {error.strerror}") from error
    tokens = np.memmap(path, dtype=info.dtype, mode="r", shape=(info.num_tokens,))
    return TokenFile(path, spec, tokens, info)


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/thinwire, or ~/.cache/thinwire."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"


def writable(folder: Path) -> Path:
    """The folder, made if needed. If it cannot be written to, the user's temporary folder, with a warning."""
    fallback = Path(tempfile.gettempdir()) / f"thinwire-{os.getuid()}"
    try:
        return probed(folder)
    except OSError as error:
        reason = error.strerror
    try:
        probed(fallback)
    except OSError as error:
        raise ConfigError(f"token cache: {folder} cannot be written to ({reason}), nor {fallback}") from error
    log.warning("token cache: %s cannot be written to (%s); %s is used instead", folder, reason, fallback)
    return fallback


def probed(folder: Path) -> Path:
    """The folder, made if needed (private to the user); OSError if no file can be made in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder


def read_info(path: Path) -> TokenInfo | None:
    """Read the sidecar of a finished token file; None if there is none. A damaged one is reported and written again."""
    try:
        info = TokenInfo(**json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))
        if path.stat().st_size == info.num_tokens * np.dtype(info.dtype).itemsize:
            return info
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        pass
    log.warning("token cache %s: is damaged; the data is tokenised again", path)
    return None


def write(path: Path, source: TextSource, tokenizer: Tokenizer, limit_tokens: int | None) -> TokenInfo:
    """Tokenise the source into `path`, then write its sidecar. A token file is whole if its sidecar exists."""
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")  # machines may share the folder
    try:
        with temporary.open("wb") as file:
            info = write_tokens(file, source, tokenizer, limit_tokens)
        temporary.replace(path)
        temporary.write_text(json.dumps(asdict(info)), encoding="utf-8")
        temporary.replace(path.with_suffix(".json"))
    finally:
        temporary.unlink(missing_ok=True)
    return info


def write_tokens(file: BinaryIO, source: TextSource, tokenizer: Tokenizer, limit_tokens: int | None) -> TokenInfo:
    """Write token ids in the narrowest type that holds the vocabulary. Return the contents of the sidecar."""
    dtype = np.min_scalar_type(np.int64(tokenizer.vocab_size - 1))
    end = tokenizer.end_of_document
    tail = np.array([] if end is None else [end], dtype=dtype)
    if end is None:
        log.warning(
            "data %r: the tokenizer has no end-of-document token; documents are joined without a mark", source.spec
        )
    digest = hashlib.sha256()
    num_tokens = num_documents = 0
    batches = map(tokenizer.encode_batch, batched(source.documents()))
    for ids in chain.from_iterable(batches):
        room = None if limit_tokens is None else limit_tokens - num_tokens
        document = np.concatenate((ids.astype(dtype), tail))[:room]
        data = document.tobytes()
        file.write(data)
        digest.update(data)
        num_tokens += len(document)
        num_documents += 1
        if num_tokens == limit_tokens:
            break
    if not num_tokens:
        raise ConfigError(f"data {source.spec!r}: holds no text")
    return TokenInfo(num_tokens, num_documents, dtype.name, digest.hexdigest())


def batched(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield lists of texts with about BATCH_CHARS characters each."""
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        batch.append(text)
        num_chars += len(text)
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch
