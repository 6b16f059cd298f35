"""Compares the first loss after a resume with the loss that the saved run had at the same step."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.checkpoint import Source
from thinwire.errors import ThinwireError
from thinwire.methods.experts import way_text
from thinwire.models.moe import MoELlama
from thinwire.table import Row
from thinwire.training.engine import Engine

# Below one bit of fp32 in the loss of one of eight ranks.
SAME_BITS = 1e-9
# Sums of fp32 in another order; of bf16; and other weights than those that computed before, such as a replica's master.
ROUNDING = {"fp32": 1e-5, "bf16": 1e-2}
OTHER_WEIGHTS = 2e-2
# fp32 on another kind of device, whose exp and softmax differ too.
OTHER_DEVICE = 1e-3


class ResumeDriftError(ThinwireError, RuntimeError):
    """A resumed run does not continue the saved one; the message has both losses."""


def circumstances_of(engine: Engine) -> dict[str, Any]:
    """What must be equal for two losses of the same weights and tokens to have the same bits.

    Also how ranks share a sequence or the experts, and to what a capacity applies: each changes the order of sums.
    """
    config, batch, stage = engine.config, engine.batch, engine.stage
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cpu": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "threads": torch.get_num_threads(),
        "ranks": engine.place.world_size,
        "micro_batch": [batch.micro_batch, batch.accumulation],
        "dtype": engine.dtype,
        "device": engine.device.name,
    }
    if stage.sequence is not None:
        found["sequence"] = str(stage.sequence.layout)
    if isinstance(engine.model, MoELlama) and engine.model.capacity_factor:
        ranks, tokens = engine.num_shares, batch.micro_batch * config.seq_len
        found["capacity"] = f"{engine.model.capacity_factor} of {tokens} tokens x {batch.accumulation} x {ranks}"
    if stage.experts is not None:
        found["experts"] = f"{stage.experts.placement}, {way_text(stage.experts.options)}"
    return found


@dataclass(frozen=True)
class Proof:
    """expected: the loss of the step after the checkpoint. tolerance: largest relative difference.

    why: the reason for it.
    """

    expected: float
    tolerance: float
    why: str

    @classmethod
    def of(cls, source: Source, expected: float, here: dict[str, Any]) -> Proof:
        """The check for a resume from `source` under these circumstances."""
        there = source.manifest.about.get("circumstances")
        # Codecs of weights may draw anew in a backward, which a run that ends does not take between two passes.
        draws = source.common["lossy_weights"] and here["micro_batch"][1] > 1
        # A GPU may add in another order in every pass.
        if source.is_same and here == there and here["device"] == "cpu" and not draws:
            return cls(expected, SAME_BITS, "the same layout: bit for bit")
        if here.get("capacity") != (there or {}).get("capacity"):
            return cls(expected, OTHER_WEIGHTS, "a capacity for other numbers of tokens drops other rows")
        if source.is_exact and not draws:
            before = {**here, **(there or {})}
            dtype = "bf16" if "bf16" in (here["dtype"], before["dtype"]) else "fp32"
            if before["device"] == here["device"]:
                return cls(expected, ROUNDING[dtype], f"the same weights, {dtype} sums in another order")
            why = f"the same weights, computed by {here['device']} and by {before['device']} before, in {dtype}"
            return cls(expected, max(ROUNDING[dtype], OTHER_DEVICE), why)
        return cls(expected, OTHER_WEIGHTS, "codecs round differently from the saved run")

    @property
    def row(self) -> Row:
        return "resume proof", f"the next loss must be {self.expected:.6f}, within {self.tolerance:g} of it", self.why

    def check(self, step: int, loss: float, *, allow_drift: bool) -> str:
        """A line with the result. Raises ResumeDriftError if the loss differs, unless `allow_drift`."""
        drift = abs(loss - self.expected) / max(abs(self.expected), 1e-12)
        both = (
            f"step {step}: the loss is {loss!r} and was {self.expected!r} before: a relative difference of {drift:.2g}"
        )
        if math.isfinite(loss) and drift <= self.tolerance:
            return f"resume proven: {both}"
        if allow_drift:
            limit = f"more than {self.tolerance:g} ({self.why})"
            return f"resume NOT proven: {both}, {limit}; the run continues because of --allow-resume-drift"
        raise ResumeDriftError(
            f"the resumed run does not continue the saved one: {both}, and {self.tolerance:g} is allowed ({self.why}); "
            "look for what has changed, or continue anyway with --allow-resume-drift"
        )
