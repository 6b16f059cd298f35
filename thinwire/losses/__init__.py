"""The cross-entropy of a large vocabulary without storing its logits, and heads that compute it."""

from thinwire.losses.cut import PRESETS, cut_cross_entropy
from thinwire.losses.head import cut_loss, head_of, loss_in_effect

__all__ = ["PRESETS", "cut_cross_entropy", "cut_loss", "head_of", "loss_in_effect"]
