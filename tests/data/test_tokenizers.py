from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from thinwire.data import ByteTokenizer, load_tokenizer, printable
from thinwire.errors import ConfigError

TEXT = "def grüße(x):\n    return '日本' + x  # 🎉\n"


def train_bpe(path: Path, specials: list[str]) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    if specials:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{specials[0]} $A", special_tokens=[(specials[0], 0)]
        )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    return path


def test_bytes_round_trip_in_a_vocabulary_of_256() -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(TEXT)
    assert ids.tolist() == list(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([*ids, 0xFF, 300]) == TEXT + "\n"
    assert tokenizer.encode("\ud800").tolist() == [ord("?")]
    every_character = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    assert tokenizer.end_of_document not in set(np.unique(tokenizer.encode(every_character)).tolist())


def test_a_tokenizer_file_round_trips_unpadded_and_uncut(tmp_path: Path) -> None:
    path = train_bpe(tmp_path / "tokenizer.json", ["<pad>", "<|endoftext|>"])
    tokenizer = load_tokenizer(str(path))
    ids, twice = tokenizer.encode_batch([TEXT, TEXT * 2])
    assert len(ids) > 4 and len(twice) == 2 * len(ids)
    assert len(ids) < len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.end_of_document == 1
    assert tokenizer.vocab_size > ids.max()
    assert load_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint  # the folder names it too


def test_a_terminal_shows_control_characters_and_obeys_none() -> None:
    drawn = ByteTokenizer().decode(b"\x1b[2Jred\x00\x9b\xff\n\tgo\r\xc2\x85")
    assert printable(drawn) == "\\x1b[2Jred\\x00\ufffd\n\n\tgo\\r\\x85"
    assert printable(TEXT) == TEXT


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    plain = load_tokenizer(str(train_bpe(tmp_path / "a.json", [])))
    other = load_tokenizer(str(train_bpe(tmp_path / "b.json", ["</s>"])))
    assert len({plain.fingerprint, other.fingerprint, ByteTokenizer().fingerprint}) == 3
    assert plain.end_of_document is None


def test_a_folder_without_a_tokenizer_is_told_how_to_write_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the folder holds no tokenizer.json; transformers writes one") as caught:
        load_tokenizer(str(tmp_path))
    assert f"t.AutoTokenizer.from_pretrained({str(tmp_path)!r}).save_pretrained(" in str(caught.value)
    assert "config.json'?" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"no such file, nor 'bytes'; choose one of bytes$"):
        load_tokenizer(str(tmp_path / "confik.json"))


def test_a_bad_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ConfigError, match="did you mean 'bytes'"):
        load_tokenizer("byte")
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"did you mean 'tokenizer.json'"):
        load_tokenizer(str(tmp_path / "tokeniser.json"))
    with pytest.raises(ConfigError, match=r"is no tokenizer.json"):
        load_tokenizer(str(path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[hf\]'"):
        load_tokenizer(str(path))
