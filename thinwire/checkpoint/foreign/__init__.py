"""Checkpoints of other programs: an ordered table of rules turns the ranks' files into whole fp32 tensors."""

from thinwire.checkpoint.foreign.formats import FORMATS, Format, detect
from thinwire.checkpoint.foreign.layouts import Averaged, FusedShards, RankLayout, Replicated, Sharded, Unique
from thinwire.checkpoint.foreign.rules import Rule, assign, consolidate, left_out
from thinwire.checkpoint.foreign.sources import DCPSource, ForeignSource, MegatronSource, SafetensorsSource, Zero3Source
from thinwire.checkpoint.foreign.tables import Sizes, huggingface, megatron, torchtitan

__all__ = [
    "FORMATS", "Averaged", "DCPSource", "Format", "FusedShards", "RankLayout", "MegatronSource", "Replicated", "Rule",
    "SafetensorsSource", "Sharded", "Sizes", "ForeignSource", "Unique", "Zero3Source", "assign", "consolidate",
    "detect", "huggingface", "left_out", "megatron", "torchtitan",
]  # fmt: skip
