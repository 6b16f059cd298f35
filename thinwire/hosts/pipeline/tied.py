"""Weights that two ranks of a pipeline share: one rank steps the weight, the other sends it its gradient."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from thinwire.collectives import Expected, Label, Mailbox


class TiedWeights:
    """Weights that this rank and other ranks use. The lower of two ranks is the owner.

    At the end of a step the owner has the sum of both gradients, and the other rank has none. Before its next forward
    the other rank receives the owner's present weight, so the copies are equal whatever has stepped the weight.

    Args:
        mailbox: of the pipeline. Messages count as those of a micro-batch after the last, each with its own hop.
        tied: for each rank, the weights shared with it, in the same order there. Ranks must call the same methods in
            the same order.
        parts: those of them of which ranks of a tensor axis each have a part.

    is_stale: whether the owner's weight may have changed.
    """

    def __init__(
        self, mailbox: Mailbox, tied: Mapping[int, Sequence[nn.Parameter]], parts: Collection[nn.Parameter] = ()
    ) -> None:
        self.mailbox, self._parts = mailbox, frozenset(parts)
        self._owned = [(peer, p) for peer, params in tied.items() if peer > mailbox.rank for p in params]
        self._borrowed = [(peer, p) for peer, params in tied.items() if peer < mailbox.rank for p in params]
        self.is_stale = True

    @property
    def borrowed(self) -> list[nn.Parameter]:
        """The weights that this rank uses but does not own."""
        return [param for _, param in self._borrowed]

    @property
    def sent_bytes(self) -> int:
        """Payload bytes of the next step: weights sent by owners, gradients sent by the others."""
        sent = [*(self._owned if self.is_stale else ()), *self._borrowed]
        return sum(p.nbytes if p in self._parts else self.mailbox.share_bytes(p.nbytes) for _, p in sent)

    def weights_to_come(self, number: int) -> list[Expected]:
        """The messages that `take_weights` will take. number: micro-batches in the step."""
        return self._expected("forward", self._borrowed, number) if self.is_stale else []

    def gradients_to_come(self, number: int) -> list[Expected]:
        """The messages that `add_gradients` will take."""
        return self._expected("backward", self._owned, number)

    @torch.no_grad()
    def take_weights(self, number: int) -> None:
        """Receive the owners' weights. Call it before this rank's first forward."""
        for label, (_, param) in _labelled("forward", self._borrowed, number) if self.is_stale else ():
            param.copy_(self._taken(label, param))

    def send_weights(self, number: int) -> None:
        """Send the weights that this rank owns. Call it after its first forward, when its own weights have arrived."""
        for label, (peer, param) in _labelled("forward", self._owned, number) if self.is_stale else ():
            self._send(peer, label, param, param.detach())
        self.is_stale = False

    @torch.no_grad()
    def add_gradients(self, number: int) -> None:
        """Send and add gradients. Call it after this rank's last backward; the weights are stepped next."""
        for label, (peer, param) in _labelled("backward", self._borrowed, number):
            self._send(peer, label, param, torch.zeros_like(param) if param.grad is None else param.grad)
            param.grad = None
        for label, (_, param) in _labelled("backward", self._owned, number):
            theirs = self._taken(label, param)
            param.grad = theirs if param.grad is None else param.grad.add_(theirs)
        self.is_stale = True

    def _send(self, peer: int, label: Label, param: nn.Parameter, values: Tensor) -> None:
        # In memory of its own: a weight or gradient changes while it travels.
        packet = values.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        send = self.mailbox.send_own if param in self._parts else self.mailbox.send
        send(peer, label, packet)

    def _taken(self, label: Label, param: nn.Parameter) -> Tensor:
        return self.mailbox.take(label).to(param.device).view(param.dtype).view(param.shape)

    def _expected(self, direction: str, held: Sequence[tuple[int, nn.Parameter]], number: int) -> list[Expected]:
        return [
            Expected(label, peer, param.nbytes, param in self._parts)
            for label, (peer, param) in _labelled(direction, held, number)
        ]


def _labelled(
    direction: str, held: Sequence[tuple[int, nn.Parameter]], number: int
) -> list[tuple[Label, tuple[int, nn.Parameter]]]:
    return [(Label(direction, number, hop), each) for hop, each in enumerate(held)]
