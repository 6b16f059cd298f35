"""The codecs that gradients may travel in, by name, each in the form that suits error feedback or its absence."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs import (
    Cast,
    Codec,
    Identity,
    Integer,
    Natural,
    RandomK,
    Sign,
    TopK,
)
from thinwire.errors import ConfigError, nearest

CODECS = ("sign", "topk", "randomk", "natural", "integer")
WITH_DENSITY, WITH_BITS = ("topk", "randomk"), ("natural", "integer")
MAX_EVERY = 1 << 14


@dataclass(frozen=True)
class GradientCodec:
    """A codec by name: "sign", "topk", "randomk", "natural" (powers of two) or "integer".

    density: of topk and randomk; None: 0.01. bits: of natural and integer; None: 4. error_feedback: whether what the
    codec loses is kept and sent later; None: for sign, topk and randomk. With it, every codec takes its form that loses
    least; without it, randomk, natural and integer take the unbiased one, which the others do not have.
    owner: whose options these are, for messages. Raises ConfigError for values that do not fit each other.
    """

    owner: str
    codec: str
    density: float | None
    bits: int | None
    error_feedback: bool | None

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ConfigError(f"codec {self.codec!r} of {self.owner} is unknown{nearest(self.codec, CODECS)}")
        for option, takers in (("density", WITH_DENSITY), ("bits", WITH_BITS)):
            value = getattr(self, option)
            if value is not None and self.codec not in takers:
                raise ConfigError(f"{option} {value} of {self.owner}: {self.codec} has none; {' and '.join(takers)} do")
        if self.codec in ("sign", "topk") and self.error_feedback is False:
            raise ConfigError(
                f"{self.owner} without error_feedback: {self.codec} has no unbiased form; "
                "randomk, natural and integer do"
            )
        if self.codec == "randomk" and not 1 / MAX_EVERY <= self._density <= 0.5:
            raise ConfigError(f"density {self._density} of {self.owner}: randomk takes 1 of 2 to 1 of {MAX_EVERY}")
        self.make()

    @property
    def feeds_back(self) -> bool:
        """Whether what the codec loses is kept."""
        return self.codec not in WITH_BITS if self.error_feedback is None else self.error_feedback

    def make(self) -> Codec:
        """The codec itself; raises ConfigError for what it refuses."""
        bits = 4 if self.bits is None else self.bits
        rounding = "nearest" if self.feeds_back else "stochastic"
        match self.codec:
            case "topk":
                return TopK(self._density, group=1024)
            case "randomk":
                values = Cast("bf16") if self.feeds_back else Identity()
                return RandomK(round(1 / self._density), values, unbiased=not self.feeds_back)
            case "natural":
                return Natural(bits, rounding=rounding)
            case "integer":
                return Integer(bits, rounding=rounding)
        return Sign()

    @property
    def _density(self) -> float:
        return 0.01 if self.density is None else self.density
