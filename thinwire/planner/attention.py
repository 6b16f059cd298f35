"""The messages of attention where ranks share sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.cost import Machine
from thinwire.methods.sequence import SequenceParallel, Shape, choose_layout, link_seconds, sent as sent_on
from thinwire.models.llama import LlamaConfig
from thinwire.planner.candidates import Candidate


@dataclass(frozen=True)
class AttentionCost:
    """A layer's messages, forward and backward, while ranks share sequences. sent: bytes by (from, to)."""

    seconds: float = 0.0
    sent: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def sent_by(self, rank: int) -> float:
        """Bytes that a rank sends."""
        return sum(num_bytes for (source, _), num_bytes in self.sent.items() if source == rank)


def attention_of(config: LlamaConfig, machine: Machine, way: Candidate, seq_len: int) -> AttentionCost:
    """The attention of `way.sequence` neighbours, in the layout that is the fastest on the slowest of their links."""
    options = SequenceParallel(parallel=way.sequence)
    codecs = options.codec("wire"), options.codec("gradients")
    head = config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads // way.tensor, max(1, config.num_key_value_heads // way.tensor)
    shape = Shape(*heads, head, way.micro_batch * seq_len)
    seconds, every = 0.0, dict[tuple[int, int], float]()
    together = way.sequence * way.tensor
    for first in (rank for rank in range(machine.num_ranks) if rank % together < way.tensor):
        ranks = range(first, first + together, way.tensor)
        links = machine.part(ranks).fabric
        local = max(links.nodes.count(node) for node in links.nodes)
        layout, _ = choose_layout(options, shape, local, links)
        sent = sent_on(layout, shape, *codecs)
        seconds = max(seconds, link_seconds(layout, sent, links))
        every |= {(ranks[a], ranks[b]): float(num_bytes) for (a, b), num_bytes in sent.items()}
    return AttentionCost(seconds, every)
