"""Splits sequences over neighbouring ranks of a group, and combines their losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from thinwire.collectives import Communicator, Meter, Topology
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.collectives.gather import all_gather_exact
from thinwire.cost import Network
from thinwire.errors import ConfigError, nearest_divisor
from thinwire.hosts.ranks import SHARED, along, meter_of, neighbours
from thinwire.hosts.sequence.attention import Sent, send_heads, sequence_attention
from thinwire.hosts.sequence.probe import check_sharing
from thinwire.hosts.sequence.seams import attention_of, replace
from thinwire.hosts.sequence.wire import SequenceWire
from thinwire.methods.options import AS_IT_IS
from thinwire.methods.sequence import SequenceLayout, SequenceParallel, choose_layout, tokens_of
from thinwire.models.documents import Attend, bounds_of
from thinwire.table import Row

IGNORED = -100
# What `auto` weighs: all layers are alike, and both attentions send in proportion to the tokens.
TYPICAL_TOKENS = 4096


class SequenceRanks:
    """A rank's place among those that share its sequences; made by `sequence_parallel`.

    Attributes:
        layout: which ranks exchange heads, and between which ranks keys and values travel.
        comm: ranks of this rank's sequences.
        everyone: all ranks that train the model.
    """

    def __init__(
        self, layout: SequenceLayout, why: str, options: SequenceParallel, wire: SequenceWire, everyone: Communicator
    ) -> None:
        self.layout, self.options, self.wire, self._why = layout, options, wire, why
        self.comm, self.everyone = wire.comm, everyone
        self._length = 0
        self._bounds: list[list[int]] = []

    def split(
        self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """This rank's tokens and targets. All ranks of a sequence give the same whole sequences.

        Sequences are padded to a multiple of layout.unit with token 0 and target -100, which is ignored in the loss.

        Shape:
            tokens: int64 [batch, length].
            targets: the same; targets[:, i] follows tokens[:, i]. They must be shifted before the split, else the last
                token of a rank would have no target. None: all -100.
            documents: the same; for each token, the number of its document, a run of equal numbers. Tokens attend only
                to their own document. None: each sequence is one document.
            results: [batch, padded length / ranks].

        Raises ConfigError for shapes that differ.
        """
        targets = torch.full_like(tokens, IGNORED) if targets is None else targets
        if tokens.shape != targets.shape or tokens.ndim != 2:
            raise ConfigError(f"tokens {list(tokens.shape)} and targets {list(targets.shape)}: both [batch, length]")
        self._length = tokens.shape[1]
        more = -self._length % self.layout.unit
        self._bounds = [] if documents is None else self._bounds_of(documents, tokens)
        own = tokens_of(self.layout, self.comm.rank, self._length + more).to(tokens.device)
        return F.pad(tokens, (0, more))[:, own], F.pad(targets, (0, more), value=IGNORED)[:, own]

    def _bounds_of(self, documents: Tensor, tokens: Tensor) -> list[list[int]]:
        """Where the documents of each sequence begin, and where the sequence ends. Padding is a document of its own."""
        if documents.shape != tokens.shape:
            raise ConfigError(
                f"tokens {list(tokens.shape)} and documents {list(documents.shape)}: both [batch, length]"
            )
        length = tokens.shape[1]
        return bounds_of(documents, length + -length % self.layout.unit)

    def positions(self, tokens: Tensor) -> Tensor:
        """Positions of this rank's tokens [batch, n] in the whole sequence that was split last: int64 [n].

        Padding gets the position of the last token, because a model may have no later positions.
        """
        found = tokens_of(self.layout, self.comm.rank, tokens.shape[1] * self.layout.size).to(tokens.device)
        return found.clamp(max=max(self._length - 1, 0)) if self._length else found

    def length(self, tokens: Tensor) -> int:
        """Tokens of the whole sequence that was split last, of which `tokens` [batch, n] are this rank's."""
        return self._length or tokens.shape[1] * self.layout.size

    def send(self, x: Tensor, heads: int, kv_heads: int) -> Tensor | Sent:
        """Start to send q, k or v of this rank's tokens, for `attention`; see `send_heads`."""
        return send_heads(x, heads, kv_heads, self.wire, self.layout)

    def attention(
        self, q: Tensor | Sent, k: Tensor | Sent, v: Tensor | Sent, *, is_causal: bool = True,
        scale: float | None = None, attend: Attend | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's tokens over the whole sequence, see `sequence_attention`. A collective.

        Each document of the last `split` attends only to itself. Raises ConfigError for attention that is not causal
        where the last `split` padded: padding is hidden only from the tokens before it.
        """
        if not is_causal and (more := -self._length % self.layout.unit):
            raise ConfigError(
                f"attention that is not causal, and {self._length} tokens over {self.layout.size} ranks: {more} more "
                f"are padding, which every token would see; nearest: {self._length + more} tokens"
            )
        return sequence_attention(
            q, k, v, self.wire, self.layout, is_causal=is_causal, scale=scale, attend=attend, bounds=self._bounds
        )

    def mean_loss(self, total: Tensor, num_valid: Tensor | int) -> Tensor:
        """The loss on which to call backward if gradients are averaged over all ranks that train the model.

        With T_r the sum of rank r's token losses and n_r its number of valid tokens, it is R T_r / sum(n). Its mean
        over the R ranks is the mean loss over all valid tokens, however unequal the n_r are. A collective over all
        ranks.

        Args:
            total: sum of the losses of this rank's tokens, scalar.
            num_valid: number of tokens in that sum.
        """
        return self._mean_over(self.everyone, total, num_valid)

    def mean_loss_of_sequences(self, total: Tensor, num_valid: Tensor | int) -> Tensor:
        """The same over only the ranks of this rank's sequences. Its mean over all ranks is then a mean of means."""
        return self._mean_over(self.comm, total, num_valid)

    def whole(self, x: Tensor) -> Tensor:
        """x [batch, n, ...] of all ranks' tokens, in order and without padding, on every rank. Without gradients."""
        parts = self._gathered(self.comm, x.detach().contiguous())
        length = x.shape[1] * self.layout.size
        order = torch.cat([tokens_of(self.layout, rank, length) for rank in range(self.layout.size)])
        joined = parts.transpose(0, 1).reshape(x.shape[0], length, *x.shape[2:])
        return joined[:, order.argsort().to(x.device)][:, : self._length]

    def forward_of(self, model: nn.Module) -> Callable[..., Tensor]:
        """The forward of a causal language model, called with whole sequences: model(tokens, targets, documents).

        Documents are optional, see `split`. It returns `mean_loss_of_sequences`; without targets the logits of the
        whole sequences, which have no gradients. Raises ConfigError without targets in training.
        """
        own, longest = model.forward, getattr(model, "max_seq_len", None)
        balanced: Callable[[Tensor], Tensor] | None = getattr(model, "balanced", None)
        if balanced is None:
            balanced = plain
        else:
            # Its balance loss counts in full on each rank, however few of the rank's tokens have a target.
            vars(model)["balanced"] = plain

        def forward(tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
            if longest is not None and tokens.shape[1] > longest:
                raise ConfigError(f"sequence of {tokens.shape[1]} tokens: the model holds at most {longest}")
            if targets is None and model.training and torch.is_grad_enabled():
                raise ConfigError(
                    "a model on a sequence axis gives the loss of whole sequences in training, and logits without "
                    "gradients: nearest: model(tokens, targets); for logits alone, model.eval() or torch.no_grad()"
                )
            part, aims = self.split(tokens, targets, documents)
            if targets is not None and getattr(model, "gives_loss", False):
                num = (aims != IGNORED).sum()
                return balanced(self.mean_loss_of_sequences(own(part, aims) * num, num))
            logits = own(part)
            if targets is None:
                return self.whole(logits)
            wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
            total = F.cross_entropy(wide, aims.flatten(), reduction="sum")
            return balanced(self.mean_loss_of_sequences(total, (aims != IGNORED).sum()))

        return forward

    @property
    def rounds(self) -> str:
        """Where and how activations are rounded, so that a loss depends on more than the weights; empty: nowhere."""
        return "" if self.wire.codec is None else f"sequence {self.wire.codec} over {self.layout}"

    def describe(self) -> list[Row]:
        """Rows of (asked for, in effect, why they differ or how it was found)."""
        ranks = f"{self.comm.world_size} ranks a sequence, {self.comm.topology}"
        codecs = f"wire {self.wire.codec or AS_IT_IS}, gradients {self.wire.gradients or AS_IT_IS}"
        return [
            (f"sequence method {self.options.method}", str(self.layout), self._why),
            ("sequence", ranks, f"padded to a multiple of {self.layout.unit} tokens; {codecs}"),
        ]

    def close(self) -> None:
        """Wait for all communication and give the process groups back."""
        for comm in dict.fromkeys([self.comm, self.everyone]):
            comm.close()

    def _mean_over(self, comm: Communicator, total: Tensor, num_valid: Tensor | int) -> Tensor:
        own = torch.as_tensor(num_valid).detach().to("cpu", torch.int64).reshape(1)
        count = int(self._gathered(comm, own).sum())
        return total * (comm.world_size / max(count, 1))

    def _gathered(self, comm: Communicator, x: Tensor) -> Tensor:
        return comm.wait(comm.submit(lambda link: all_gather_exact(link, x), urgent=True))


def plain(loss: Tensor) -> Tensor:
    """The loss of a model without an additional loss."""
    return loss


def sequence_parallel(
    model: nn.Module,
    options: SequenceParallel,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    stride: int = 1,
    local_size: int | None = None,
    network: Network | None = None,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    checked: bool = False,
    meter: Meter | None = None,
) -> SequenceRanks:
    """Let a causal language model attend over sequences that are split over neighbouring ranks. A collective.

    The model keeps its weights, the same on all ranks; call it with the results of `split`. As without it, every
    strategy averages gradients over all ranks of the group.

    Args:
        model: a model of thinwire, or a causal language model of transformers.
        options: such as SequenceParallel(4). A group of n ranks then has n / 4 sequences at a time.
        group: all ranks that train the model; None: the world.
        stride: distance between neighbouring ranks of a sequence.
        local_size: ranks per node; None: found from the launcher or host names.
        network: rates between the ranks of a sequence, for method "auto"; see `choose_layout`.
        seed: of the codecs' randomness.
        timeout_s, checked, meter: see Communicator.

    Raises ConfigError for a number of ranks that does not divide the group's, for heads that can't be divided, for
    dropout in the attention, and for models whose attention can't be replaced or whose tokens interact outside of it.
    """
    shape = attention_of(model, TYPICAL_TOKENS)
    check_sharing(model)
    make = partial(Communicator, timeout_s=timeout_s, checked=checked)
    everyone = make(group, local_size=local_size, meter=meter or meter_of(model))
    ranks, world_size = options.parallel, everyone.world_size
    check_ranks(options, world_size)
    members = neighbours(everyone.rank, ranks, stride)
    topology = Topology.stated(ranks, along(everyone.topology, members))
    layout, why = choose_layout(options, shape, topology.local_size, network)
    comm = everyone
    if ranks < world_size:
        own = [everyone.global_ranks[rank] for rank in members]
        comm = make(own, local_size=topology.local_size, meter=everyone.meter)
    wire = SequenceWire(comm, options.codec("wire"), options.codec("gradients"), seed)
    found = SequenceRanks(layout, why, options, wire, everyone)
    replace(model, found.attention, found.positions, found.length, found.send)
    SHARED.setdefault(model, []).append(found)
    return found


def check_ranks(options: SequenceParallel, world_size: int) -> None:
    """Raise ConfigError for a number of ranks that does not divide the group's."""
    if world_size % options.parallel:
        near = nearest_divisor(options.parallel, world_size)
        raise ConfigError(f"sequences over {options.parallel} ranks of {world_size}: must divide them; nearest: {near}")
