"""Long sequences over several ranks: each rank's tokens and heads, and the bytes of the two attentions."""

from thinwire.methods.sequence.blocks import RingBlocks, visible
from thinwire.methods.sequence.inside import check_strategy
from thinwire.methods.sequence.layout import SequenceLayout, head_shares, kv_share, nearest_layout, tokens_of
from thinwire.methods.sequence.options import SequenceParallel
from thinwire.methods.sequence.traffic import Shape, choose_layout, facts, link_seconds, network_of, sent

__all__ = [
    "RingBlocks", "SequenceLayout", "SequenceParallel", "Shape", "check_strategy", "choose_layout", "facts",
    "head_shares", "kv_share", "link_seconds", "nearest_layout", "network_of", "sent", "tokens_of", "visible",
]  # fmt: skip
