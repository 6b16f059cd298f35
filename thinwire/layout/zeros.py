"""Start-up rows about weights that get no gradient, for codecs that may move them."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.codecs import Codec
from thinwire.table import Row

WEIGHTS = "weights without a gradient"


def describe_zeros(codecs: Iterable[Codec]) -> list[Row]:
    """A row for each codec of gradients that doesn't keep zeros: AdamW would make a full step of such a value."""
    moving = dict.fromkeys(codec for codec in codecs if codec.traits.keeps_zeros != 1)
    return [
        (
            WEIGHTS,
            f"change, unless {run} neighbours have none" if run else "change",
            f"{codec} has no code for zero",
        )
        for codec in moving
        for run in [codec.traits.keeps_zeros]
    ]
