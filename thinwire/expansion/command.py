"""`thinwire expand` as a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from thinwire.expansion.options import read
from thinwire.report.units import short

# Of the decay from scratch: 132,000 of 220,000 steps for BERT; for ViT it is 130 of 300 epochs.
DECAY = 0.6


def run_expand(args: Sequence[str]) -> int:
    """Write the folder, and say how well it agrees with the small model and how to train it."""
    config = read(args)
    from thinwire.convert.origin import training_command
    from thinwire.expansion.expand import expand

    done = expand(**asdict(config))
    print(f"{config.to}: {short(done.num_parameters)} parameters, from {short(done.num_small)} of {config.source}")
    loss = "; a classifier has no loss on text"
    if done.loss is not None:
        loss = f"; loss {done.loss[0]:.4f} before, {done.loss[1]:.4f} after"
    print(
        f"compared on {done.num_tokens:,} held-out tokens: logits differ by at most {done.error:.2g} of the largest "
        f"one{loss}"
    )
    if done.unrounded is not None:
        print(
            "the weights are rounded to the source's narrow dtype; before that, logits differed by at most "
            f"{done.unrounded:.2g}, so the rest is rounding"
        )
    print(
        f"train it: {training_command(config.to)}, with the highest learning rate and the warm-up that a model of this "
        f"size takes from scratch, and about {DECAY} of its steps (--steps): the decay is that much shorter"
    )
    return 0
