"""Parameters and operations of a GPT by closed forms, and how three large ones were trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPT:
    """A decoder with learned positions, biases, an inner width of 4 h, and a head that is tied to the embedding.

    Attributes:
        layers: l. hidden: h, features of a token. vocab: V. seq_len: s, tokens of a sequence.
    """

    layers: int
    hidden: int
    vocab: int = 51_200
    seq_len: int = 2_048

    @property
    def parameters(self) -> float:
        """P = 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)).

        Source: Narayanan et al. (SC 2021), equation 2.
        """
        more = 13 / (12 * self.hidden) + (self.vocab + self.seq_len) / (12 * self.layers * self.hidden)
        return 12 * self.layers * self.hidden**2 * (1 + more)

    def operations(self, num_sequences: int, *, recompute: bool = True) -> float:
        """Floating-point operations of a step: F = 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)).

        Without recomputation of the layers' forwards 72 in place of 96, and 12 in place of 16. num_sequences: B.

        Source: Narayanan et al. (SC 2021), equation 3.
        """
        each, head = (96, 16) if recompute else (72, 12)
        more = self.seq_len / (6 * self.hidden) + self.vocab / (head * self.layers * self.hidden)
        return each * num_sequences * self.seq_len * self.layers * self.hidden**2 * (1 + more)


@dataclass(frozen=True)
class Recipe:
    """How one replica of a large model was trained on a supercomputer with slow links between its nodes.

    Attributes:
        tensor: ranks over which matrices are cut, inside a node. stages: of the pipeline.
        num_sequences: of one replica in a step, one in each micro-batch.
        flops: operations per second that a rank reached.

    Source: "Optimizing Distributed Training on Frontier for Large Language Models" (ISC 2024).
    """

    model: GPT
    tensor: int
    stages: int
    num_sequences: int
    flops: float

    @property
    def ranks(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.stages

    @property
    def step_s(self) -> float:
        """Seconds of a step, all waits included."""
        return self.model.operations(self.num_sequences) / self.ranks / self.flops


# The paper states no number of stages for 22b.
RECIPES = {
    "22b": Recipe(GPT(48, 6_144), 2, 8, 640, 73.5e12),
    "175b": Recipe(GPT(96, 12_288), 4, 16, 640, 69.2e12),
    "1t": Recipe(GPT(128, 25_600), 8, 64, 1_600, 61.2e12),
}
