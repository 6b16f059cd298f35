"""Cross-entropy of the logits e c^T, which never holds the logits of all tokens."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from thinwire.errors import ConfigError, nearest
from thinwire.losses.blocks import ACCUMULATIONS, check_ids, is_fake, logits_of
from thinwire.losses.fused import FusedCrossEntropy
from thinwire.losses.ranks import SameOnRanks, SumOfRanks
from thinwire.losses.tiles import FILTERS, Tiles, Tiling, inside, peak_of_ranks

IGNORED = -100
IMPLEMENTATIONS = ("auto", "fused", "tiles", "plain", "torch")
REDUCTIONS = ("mean", "sum", "none")
# What the paper's code calls its choices: which gradients leave tiles out, and how sums are made.
PRESETS: dict[str, dict[str, str]] = {
    "cce": {"impl": "tiles", "accumulation": "plain", "filter_e": "drop", "filter_c": "drop"},
    "cce_kahan": {"impl": "tiles", "accumulation": "kahan", "filter_e": "drop", "filter_c": "drop"},
    "cce_kahan_full_c": {"impl": "tiles", "accumulation": "kahan", "filter_e": "drop"},
    "cce_kahan_full_c_full_e": {"impl": "tiles", "accumulation": "kahan"},
    "cce_exact": {"impl": "tiles", "accumulation": "kahan"},
    "torch_compile": {"impl": "plain"},
}


@overload
def cut_cross_entropy(
    e: Tensor, c: Tensor, targets: Tensor, *, bias: Tensor | None = ..., ignore_index: int = ..., shift: int = ...,
    softcap: float | None = ..., reduction: str = ..., z_loss: float = ..., return_lse: Literal[False] = ...,
    accumulation: str = ..., filter_e: str | None = ..., filter_c: str | None = ...,
    group: dist.ProcessGroup | None = ..., data_group: dist.ProcessGroup | None = ..., impl: str = ...,
    generator: torch.Generator | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def cut_cross_entropy(
    e: Tensor, c: Tensor, targets: Tensor, *, bias: Tensor | None = ..., ignore_index: int = ..., shift: int = ...,
    softcap: float | None = ..., reduction: str = ..., z_loss: float = ..., return_lse: Literal[True],
    accumulation: str = ..., filter_e: str | None = ..., filter_c: str | None = ...,
    group: dist.ProcessGroup | None = ..., data_group: dist.ProcessGroup | None = ..., impl: str = ...,
    generator: torch.Generator | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def cut_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    shift: int = 0,
    softcap: float | None = None,
    reduction: str = "mean",
    z_loss: float = 0.0,
    return_lse: bool = False,
    accumulation: str = "fp32",
    filter_e: str | None = None,
    filter_c: str | None = None,
    group: dist.ProcessGroup | None = None,
    data_group: dist.ProcessGroup | None = None,
    impl: str = "auto",
    generator: torch.Generator | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of targets under logits e c^T, in a small part of the logits' memory.

        a_nv = softcap tanh((e_n . c_v + bias_v) / softcap)         lse_n = log sum_v exp(a_nv)
        loss_n = lse_n - a_(n, target n) + z_loss lse_n^2

    Products are computed in the dtype of e, softmax and loss in fp32, or fp64 for fp64. Tokens whose target is
    `ignore_index` are left out, and have loss 0, lse 0 and no gradient; a mean over no tokens is 0.

    Args:
        e: the input of the head. c: the head's weight. bias: the head's bias, or None.
        targets: word of each token, or `ignore_index`.
        shift: position i is compared with the target at i + shift; 0: targets are shifted already.
        softcap: above 0, or None for none.
        reduction: "mean" over the tokens that count, "sum" or "none".
        return_lse: return lse too.
        accumulation: of the gradients: "fp32" (fp64 for fp64), "kahan": in the dtype of e and c with the rounding
            errors carried along, or "plain": in that dtype.
        filter_e, filter_c: for the gradient of e, and of c and bias: what happens to a tile in which no element of
            softmax less target reaches eps, 1/32 of the dtype's epsilon. "drop" leaves the tile out; "unbiased" keeps
            it with probability max / eps, and multiplies it by eps / max, so that the expected gradient is exact. Words
            are then sorted by their mean logit, so that likely ones share tiles. None: all tiles count. With "drop",
            rare words hardly get a gradient.
        group: ranks that each hold some rows of c and bias, or none, in the order of the ranks; e and targets are the
            same on all of them, and so is the loss. They exchange two or three messages of one or two numbers per
            token, and the gradient of e.
        data_group: ranks that have other tokens, and over which gradients are averaged. A mean then divides by the mean
            number of tokens that count over these ranks, so that its mean over them is that over all of their tokens,
            however unequal their numbers are. They exchange one number. None: a mean over this rank's tokens.
        impl: "fused": computes gradients in the forward from the logits of 128 tokens at a time, for "mean" and "sum"
            alone; "tiles": 256 tokens x 1024 words, computed again in the backward; "plain": all logits, of a group
            those of the own rows; "torch":
            F.linear_cross_entropy of torch 2.13, with its chunks; or one of PRESETS. "auto": fused where it can be.
        generator: CPU generator for the draws of "unbiased"; None: torch's own.

    Shape:
        e: [..., D]. c: [V, D], in the dtype of e. bias: [V]. targets: int64 [...]. Returns a scalar, or [...] for
            "none",
        fp32 or fp64; with `return_lse` a pair with lse, [...].

    A DTensor c that is sharded by rows brings the group, its mesh. If e and targets are DTensors, they are
    gathered. The result is a local tensor.
    Raises ConfigError for shapes and options that do not fit each other, and for a target that the vocabulary lacks.
    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (ICLR 2025), algorithms 1 to 3; fused:
    the order of Liger's kernel; the unbiased filter is ours.
    """
    if isinstance(impl, str) and impl in PRESETS:
        stated = {"accumulation": accumulation, "filter_e": filter_e, "filter_c": filter_c}
        impl, accumulation, filter_e, filter_c = _preset(impl, stated)
    e, c, targets, bias, group = _local(e, c, targets, bias, group)
    scalar_only = {
        "group": group is not None, "return_lse": return_lse, "filters": bool(filter_e or filter_c),
        "reduction 'none'": reduction == "none",
    }  # fmt: skip
    _check(locals())
    if impl == "auto":
        impl = "tiles" if any(scalar_only.values()) else "fused"
    if shift:
        e, targets = e[..., :-shift, :], targets[..., shift:]
    shape, e, targets = targets.shape, e.reshape(-1, e.shape[-1]), targets.reshape(-1)
    counts = targets != ignore_index
    num: float = int(counts.sum()) if not is_fake(counts) else len(targets)
    if num < len(targets):
        e, targets = e[counts], targets[counts]
    if group is None:
        check_ids(targets, len(c))
    if data_group is not None and not is_fake(counts):
        every = torch.tensor(num, device=counts.device)
        dist.all_reduce(every, group=data_group)
        num = int(every) / dist.get_world_size(data_group)
    scale = 1 / (num or 1) if reduction == "mean" else 1.0
    if impl == "fused":
        return FusedCrossEntropy.apply(e, c, bias, targets, scale, softcap, z_loss, accumulation)
    if impl == "torch":
        options = torch.nn.LinearCrossEntropyOptions()
        total = F.linear_cross_entropy(e, c, targets, linear_bias=bias, reduction="sum", options=options)
        return total * scale
    if impl == "plain":
        losses, lse = _plain(e, c, bias, targets, softcap, group)
    else:
        tiling = Tiling(softcap, accumulation, filter_e, filter_c, group, generator)
        losses, lse = Tiles.apply(e, c, bias, targets, tiling)
    losses = losses + z_loss * lse.square() if z_loss else losses
    found = _spread(losses, counts, shape) if reduction == "none" else losses.sum() * scale
    return (found, _spread(lse, counts, shape)) if return_lse else found


def _plain(
    e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor, softcap: float | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Loss and lse of each token from all its logits; of a group, from those of each rank's rows, in two sums."""
    logits = logits_of(e if group is None else SameOnRanks.apply(e, group), c, bias, None)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    if group is None:
        lse = logits.logsumexp(1)
        return lse - logits.gather(1, targets[:, None])[:, 0], lse
    if not len(c):
        # No rows here: the logit of a word that can't be has a maximum, and adds 0 to the sums.
        logits = F.pad(logits, (0, 1), value=-torch.inf)
    peak, first, num_words = peak_of_ranks(logits.detach().amax(1), len(c), group)
    check_ids(targets, num_words)
    at, is_in = inside(targets - first, slice(0, len(c)))
    total, correct = SumOfRanks.apply(
        torch.stack(((logits - peak[:, None]).exp().sum(1), torch.where(is_in, logits.gather(1, at), 0)[:, 0])), group
    )
    lse = total.log() + peak
    return lse - correct, lse


def _preset(name: str, stated: dict[str, str | None]) -> tuple[str, str, str | None, str | None]:
    """impl, accumulation and filters of a preset. Raises ConfigError where one is stated beside it."""
    own: dict[str, Any] = {"accumulation": "fp32", "filter_e": None, "filter_c": None}
    for option, value in stated.items():
        if value != own[option]:
            raise ConfigError(f"impl {name!r} has its own {option}, and {value!r} is stated; nearest: impl 'tiles'")
    own |= PRESETS[name]
    return own["impl"], own["accumulation"], own["filter_e"], own["filter_c"]


def _local(
    e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, dist.ProcessGroup | None]:
    """This rank's part of c and bias, all of e and targets, and who has the other parts.

    Raises ConfigError for other placements.
    """
    if isinstance(c, DTensor):
        mesh, placements = c.device_mesh, tuple(c.placements)
        if mesh.ndim != 1 or placements not in ((Shard(0),), (Replicate(),)):
            raise ConfigError(f"c is placed as {list(placements)}: nearest: [Shard(dim=0)] on one axis")
        if placements == (Shard(0),):
            if group is not None:
                raise ConfigError("c is a DTensor, whose mesh is the group; nearest: leave group out")
            group = mesh.get_group()
        if bias is not None and not (isinstance(bias, DTensor) and tuple(bias.placements) == placements):
            raise ConfigError("bias must be a DTensor placed as c is")
        c, bias = c.to_local(), bias.to_local() if isinstance(bias, DTensor) else None
    elif isinstance(bias, DTensor):
        raise ConfigError("bias is a DTensor and c is not; nearest: c as a DTensor placed as bias is")
    e, targets = (each.full_tensor() if isinstance(each, DTensor) else each for each in (e, targets))
    return e, c, targets, bias, group


def _is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object, usual: int) -> int:
    """The integer that is nearest to a value; `usual` for one that is no finite number."""
    return round(value) if isinstance(value, int | float) and math.isfinite(value) else usual


def _check(given: dict[str, Any]) -> None:
    """Raise ConfigError, with the nearest choice, for what can't work."""
    e, c, targets, bias = (given[name] for name in ("e", "c", "targets", "bias"))
    impl, softcap, shift = (given[name] for name in ("impl", "softcap", "shift"))
    for name, usual in (("ignore_index", IGNORED), ("shift", 0)):
        if type(given[name]) is not int:
            raise ConfigError(f"{name} {given[name]!r}: must be an integer; nearest: {_whole(given[name], usual)}")
    for name, known in (("reduction", REDUCTIONS), ("accumulation", ACCUMULATIONS)):
        if given[name] not in known:
            raise ConfigError(f"{name} {given[name]!r}: no such choice{nearest(str(given[name]), known)}")
    if impl not in IMPLEMENTATIONS:
        raise ConfigError(f"impl {impl!r}: no such choice{nearest(str(impl), [*IMPLEMENTATIONS, *PRESETS])}")
    for name in ("filter_e", "filter_c"):
        if given[name] not in (None, *FILTERS):
            raise ConfigError(f"{name} {given[name]!r}: no such filter{nearest(str(given[name]), FILTERS)}")
    if c.dim() != 2 or e.shape[-1:] != c.shape[1:] or e.shape[:-1] != targets.shape:
        raise ConfigError(
            f"e {list(e.shape)}, c {list(c.shape)} and targets {list(targets.shape)}: must be [..., D], [V, D], [...]"
        )
    if bias is not None and bias.shape != c.shape[:1]:
        raise ConfigError(f"bias {list(bias.shape)}: must be [{len(c)}], an entry for each row of c")
    if e.dtype != c.dtype:
        raise ConfigError(f"e is {e.dtype} and c is {c.dtype}: they must be equal")
    if softcap is not None and not (_is_number(softcap) and softcap > 0):
        raise ConfigError(f"softcap {softcap!r}: must be a number above 0; nearest: None for none")
    if shift < 0 or (shift and (targets.dim() == 0 or shift > targets.shape[-1])):
        near = 0 if shift < 0 or targets.dim() == 0 else targets.shape[-1]
        raise ConfigError(f"shift {shift}: must be from 0 to the length of a sequence; nearest: {near}, the usual: 1")
    if given["data_group"] is not None and given["reduction"] != "mean":
        raise ConfigError(f"reduction {given['reduction']!r}: data_group is for a mean alone; nearest: leave it out")
    if not (_is_number(z_loss := given["z_loss"]) and z_loss >= 0):
        raise ConfigError(f"z_loss {z_loss!r}: must be a number of at least 0; nearest: 0")
    needing = [name for name, is_stated in given["scalar_only"].items() if is_stated]
    if impl in ("fused", "torch") and needing:
        raise ConfigError(f"impl {impl!r} does not support {' and '.join(needing)}; nearest: impl 'tiles'")
    if impl == "plain" and (given["filter_e"] or given["filter_c"]):
        raise ConfigError("impl 'plain' has no filters; nearest: impl 'tiles'")
    if impl == "torch" and (softcap is not None or given["z_loss"]):
        raise ConfigError("impl 'torch' has no softcap and no z_loss; nearest: impl 'fused'")
    if impl == "torch" and not hasattr(F, "linear_cross_entropy"):
        raise ConfigError(f"impl 'torch' needs torch 2.13, and this is {torch.__version__}; nearest: impl 'fused'")


def _spread(values: Tensor, counts: Tensor, shape: torch.Size) -> Tensor:
    """Values of the tokens that count, at the places of all; 0 elsewhere."""
    if len(values) == counts.numel():
        return values.view(shape)
    found = torch.zeros(counts.shape, dtype=values.dtype, device=values.device)
    return found.masked_scatter(counts, values).view(shape)
