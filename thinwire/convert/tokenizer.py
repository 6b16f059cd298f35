"""The tokenizer of an exported folder, in the form that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from thinwire.data import load_tokenizer
from thinwire.errors import ConfigError

BYTES_END = "<|endoftext|>"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write_tokenizer(spec: str, max_len: int, folder: Path) -> None:
    """Write the tokenizer `spec` into the folder: a tokenizer.json unchanged, bytes as a byte-level vocabulary.

    Raises ConfigError for bytes if the tokenizers library is not installed.
    """
    if spec == "bytes":
        write_bytes(folder)
        settings: dict[str, object] = {"eos_token": BYTES_END, "split_special_tokens": True}
    else:
        path = Path(spec).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        shutil.copy(path, folder / "tokenizer.json")
        copy_beside(path.parent, folder)
        settings = {"eos_token": token} if (token := end_token(spec, folder)) else {}
    if not (folder / "tokenizer_config.json").exists():
        common = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings = common | {"model_max_length": max_len} | settings
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def copy_beside(source: Path, folder: Path) -> None:
    """Copy the files beside a tokenizer.json that transformers also reads."""
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)


def end_token(spec: str, folder: Path) -> str | None:
    """The token that ends a document, in its written form."""
    end = load_tokenizer(spec).end_of_document
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return next((token["content"] for token in content.get("added_tokens", []) if token["id"] == end), None)


def write_bytes(folder: Path) -> None:
    """Write a vocabulary of the 256 bytes, each with its value as id, without merges; 255 ends a document."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise ConfigError(
            "export of a run with --tokenizer bytes needs tokenizers: pip install -e '.[hf]' in thinwire's folder"
        ) from None
    vocab = {byte_symbol(byte): byte for byte in range(255)} | {BYTES_END: 255}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def byte_symbol(byte: int) -> str:
    """The character that stands for a byte in byte-level vocabularies: itself if it is visible, else one above 255."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in visible:
        return chr(byte)
    return chr(0x100 + sum(other not in visible for other in range(byte)))
