"""Any gradient codec on the sharded host, with the feedback that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.codecs import Identity
from thinwire.errors import ConfigError, nearest
from thinwire.layout.formats import WireFormat
from thinwire.methods.options import check_types, codec_of, with_feedback
from thinwire.methods.sharded import ShardedMethod, as_differences

# Whether the codec must be a contraction; None: it decides itself.
FEEDBACKS: dict[str, bool | None] = {"auto": None, "none": False, "error": True, "estimates": True}


@dataclass(frozen=True)
class ZeroCompressed(ShardedMethod):
    """Sparse or few-bit gradients between nodes on the sharded optimizer, with feedback; fp32 inside a node.

    Gradients of norms and biases travel in fp32.

    Raises ConfigError for a codec that does not fit its place. Source: Karimireddy et al., "Error feedback fixes
    SignSGD" (ICML 2019), and Richtarik, Sokolov and Fatkhullin, "EF21" (NeurIPS 2021), on the hop between nodes.
    """

    name: ClassVar[str] = "zero-compressed"

    gradients: str = "sign/512"
    """Codec of the gradients of matrices between nodes, such as topk1%/1024 or randomk1%:bf16:biased."""
    feedback: str = "auto"
    """Compensation for what the codec loses: none; error: send it later; estimates: send differences from an estimate
    (EF21); auto: none for an unbiased codec, else error."""
    fresh: float = 1.0
    """With estimates: share of the new gradient in the momentum that is estimated, above 0 to 1 (EF21-SGDM)."""
    weights: str = "int4/2048"
    """Codec of the weights; all but fp32 and bf16 carry their differences."""
    vector_weights: str = "int8/128"
    """Codec of the weights of norms and biases, as of the others."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.feedback not in FEEDBACKS:
            hint = nearest(self.feedback, FEEDBACKS)
            raise ConfigError(f"feedback {self.feedback!r} of ZeroCompressed: must be {', '.join(FEEDBACKS)}{hint}")
        if not 0 < self.fresh <= 1:
            raise ConfigError(f"fresh {self.fresh} of ZeroCompressed: must be above 0 and at most 1; nearest: 1")
        if self.fresh != 1 and self.feedback != "estimates":
            rule = f"changes nothing with feedback {self.feedback}; nearest: 1, or feedback estimates"
            raise ConfigError(f"fresh {self.fresh} of ZeroCompressed: {rule}")
        self.matrix()
        self.vector()

    @property
    def not_on_fsdp(self) -> str:
        """Why compress_fsdp can't run it, to follow its name; empty: it can."""
        wire = self.matrix()
        return "keeps feedback, for which FSDP2 has no place: use thinwire.zero" if wire.feedback or wire.fresh else ""

    def matrix(self) -> WireFormat:
        weights = codec_of(self, "weights")
        gradients, is_kept = with_feedback(self, "gradients", FEEDBACKS[self.feedback])
        is_error, fresh = is_kept and self.feedback != "estimates", self.fresh if self.feedback == "estimates" else 0.0
        return WireFormat(weights, as_differences(weights), Identity(), gradients, is_error, fresh)

    def vector(self) -> WireFormat:
        weights = codec_of(self, "vector_weights")
        return WireFormat(weights, as_differences(weights), intra=Identity(), inter=Identity())
