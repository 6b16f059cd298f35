"""The table of `thinwire codecs`: for each codec how it is written, what it costs and what it promises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thinwire.codecs.base import Codec
from thinwire.codecs.spelling import SPELLINGS
from thinwire.errors import Problems

HEADS = ("codec", "bits", "traits", "options")


def print_codecs(texts: Sequence[str]) -> None:
    """Print a line for each codec, by default for all. Raises ConfigError for the texts that are no codec."""
    problems = Problems()
    codecs = [problems.note(Codec.parse, text) for text in texts]
    problems.raise_any()
    rows = [HEADS, *(map(row, filter(None, codecs)) if texts else all_rows())]
    widths = [max(len(line[column]) for line in rows) for column in range(len(HEADS) - 1)]
    for codec, bits, traits, options in rows:
        print(f"{codec:<{widths[0]}}  {bits:>{widths[1]}}  {traits:<{widths[2]}}  {options}".rstrip())


def all_rows() -> Iterator[tuple[str, str, str, str]]:
    """A row for every class, with its defaults; of a class with several names one for each."""
    made = [(spelling.wraps is not None, spelling.cls(**spelling.sets)) for spelling in SPELLINGS]
    for _, codec in sorted(made, key=lambda one: (one[0], -one[1].bits_per_element, str(one[1]))):
        yield row(codec)


def row(codec: Codec) -> tuple[str, str, str, str]:
    """The codec's text, bits per element, traits and options."""
    spelling = next(spelling for spelling in SPELLINGS if spelling.cls is type(codec))
    traits = codec.traits
    names = [name for name in ("lossless", "unbiased", "contraction", "linear") if getattr(traits, name)]
    if traits.keeps_zeros:
        names.append("keeps zeros" + (f" in runs of {traits.keeps_zeros}" if traits.keeps_zeros > 1 else ""))
    bits = ("at most " if codec.has_variable_length else "") + f"{codec.bits_per_element:.4g}"
    return str(codec), bits, ", ".join(names), " ".join(spelling.option_forms())
