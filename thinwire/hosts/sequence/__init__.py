"""Runs models on parts of sequences: messages of attention, interfaces to models, the loss over all ranks."""

from thinwire.hosts.sequence.attention import ring_attention, ulysses_attention
from thinwire.hosts.sequence.parallel import SequenceRanks, sequence_parallel

__all__ = ["SequenceRanks", "ring_attention", "sequence_parallel", "ulysses_attention"]
