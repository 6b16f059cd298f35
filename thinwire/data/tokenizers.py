from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from thinwire.errors import ConfigError, nearest

DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Converts text to token ids and back. `end_of_document` is the id after each document; None: there is none."""

    vocab_size: int
    end_of_document: int | None
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, unsigned integers [num_tokens]."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of several texts."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids."""


class ByteTokenizer:
    """Each UTF-8 byte is a token. 0xFF, which UTF-8 never uses, ends a document, so the vocabulary is exactly 256."""

    vocab_size: int = 256
    end_of_document: int | None = 0xFF
    fingerprint: str = "bytes-256"

    def encode(self, text: str) -> np.ndarray:
        """The bytes of a text, uint8 [num_bytes]. A lone surrogate, which has no bytes, becomes "?"."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of bytes. The end of a document becomes a line break, a broken character U+FFFD."""
        data = bytes(0x0A if i == self.end_of_document else int(i) for i in ids if i < self.vocab_size)
        return data.decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the tokenizers library (extra `hf`).

    Its truncation, padding and added special tokens are off. A document ends with the first of DOCUMENT_ENDS that
    the vocabulary has. Raises ConfigError if the library is missing or cannot read the file.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                f"tokenizer {str(path)!r}: needs tokenizers; pip install -e '.[hf]' in thinwire's folder"
            ) from None
        try:
            content = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ConfigError(f"tokenizer {str(path)!r}: is no tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        self.end_of_document = next((ids[name] for name in DOCUMENT_ENDS if name in ids), None)
        self.fingerprint = f"file-{hashlib.sha256(content).hexdigest()[:16]}"

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, uint32 [num_tokens]."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of several texts, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode([int(i) for i in ids])


def printable(text: str) -> str:
    """The text with control characters, which a terminal would obey, as escapes. Line breaks and tabs stay."""
    return "".join(repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def load_tokenizer(spec: str) -> Tokenizer:
    """Load the tokenizer `spec`: "bytes", a tokenizer.json, or a folder with one. Raises ConfigError otherwise."""
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            write = f"AutoTokenizer.from_pretrained({spec!r}).save_pretrained({spec!r})"
            raise ConfigError(
                f"tokenizer {spec!r}: the folder holds no tokenizer.json; transformers writes one for most models: "
                f'python -c "import transformers as t; t.{write}"'
            )
    if not path.is_file():
        names = {"bytes", *(file.name for file in path.parent.glob("*tokenizer*.json"))} - {"tokenizer_config.json"}
        raise ConfigError(f"tokenizer {spec!r}: no such file, nor 'bytes'{nearest(path.name, names)}")
    return FileTokenizer(path)
