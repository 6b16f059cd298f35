"""Runs models on parts of sequences: messages of attention, interfaces to models, the loss over all ranks."""

from thinwire.hosts.sequence.attention import ulysses_attention
from thinwire.hosts.sequence.parallel import SequenceRanks, sequence_parallel
from thinwire.hosts.sequence.ring import ring_attention

__all__ = ["SequenceRanks", "ring_attention", "sequence_parallel", "ulysses_attention"]
