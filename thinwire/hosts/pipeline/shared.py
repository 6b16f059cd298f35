"""Messages to all ranks of a tensor axis: each rank sends a share, and the receiving ranks gather the shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from thinwire.collectives import Communicator, Expected, Label, Mailbox
from thinwire.collectives.gather import all_gather_exact


class SharedMailbox(Mailbox):
    """A mailbox between stages whose ranks on the tensor axis all send and take the same messages.

    Of a message of n bytes, rank i of t sends bytes [i s, (i + 1) s), with s = ceil(n / t), to rank i of the other
    stage, whose ranks then gather the shares. So a border carries each byte once, and the same bits arrive. The ranks
    of a tensor axis must take the same messages in the same order. A message that `is_own` goes whole to rank i of the
    other stage: it is about rank i's part of a parameter.

    axis: communicator over the tensor ranks. place, options: as for Mailbox.
    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
    section 4.1.
    """

    def __init__(self, axis: Communicator, *place: Any, **options: Any) -> None:
        super().__init__(*place, **options)
        self.axis = axis
        self._sizes: dict[Label, int] = {}

    def share_bytes(self, num_bytes: int) -> int:
        return -(-num_bytes // self.axis.world_size)

    def begin(self, expected: Sequence[Expected]) -> None:
        self._sizes = {one.label: one.num_bytes for one in expected if not one.is_own}
        super().begin(
            [one if one.is_own else replace(one, num_bytes=self.share_bytes(one.num_bytes)) for one in expected]
        )

    def send(self, peer: int, label: Label, message: Tensor, num_bytes: int | None = None) -> None:
        # Shares have one length, whatever a packet needs of its room: the ranks behind can't know that length before.
        share = self.share_bytes(message.numel())
        own = message[share * self.axis.rank : share * (self.axis.rank + 1)]
        super().send(peer, label, nn.functional.pad(own, (0, share - own.numel())))

    def send_own(self, peer: int, label: Label, message: Tensor) -> None:
        super().send(peer, label, message)

    def take(self, label: Label, length: Callable[[Tensor], int] = Tensor.numel) -> Tensor:
        own = super().take(label)
        if label not in self._sizes:
            return own
        shares = self.axis.wait(self.axis.submit(lambda link: all_gather_exact(link, own), urgent=True))
        return shares.flatten()[: self._sizes[label]]
