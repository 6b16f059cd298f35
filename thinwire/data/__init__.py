"""Token sources: tokenises text once into a file, and serves batches from a position that can be saved."""

from typing import TYPE_CHECKING

from thinwire.data.cache import TokenFile, prepare
from thinwire.data.sources import documents
from thinwire.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer, printable
from thinwire.lazy import lazily

if TYPE_CHECKING:
    from thinwire.data.loader import BatchLoader, documents_of, heldout_batches

__all__ = [
    "BatchLoader", "ByteTokenizer", "FileTokenizer", "TokenFile", "Tokenizer", "documents", "documents_of",
    "heldout_batches", "load_tokenizer", "prepare", "printable",
]  # fmt: skip
__getattr__ = lazily(__name__, {"loader": ("BatchLoader", "documents_of", "heldout_batches")})
