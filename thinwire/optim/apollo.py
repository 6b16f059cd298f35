"""APOLLO: moments of a low-rank projection of the gradient set how far each channel of a matrix moves."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.codecs import Identity, derive_seed
from thinwire.codecs.normals import normals
from thinwire.codecs.random import named_seed
from thinwire.errors import ConfigError, similar
from thinwire.optim.parameterwise import check_adamw
from thinwire.optim.sums import Part, PieceSpan, Record, Sum, SummingOptimizer, Update, codec_of_sums

LARGER, ROWS = "larger", "rows"
# Of the last update's norm: smaller updates, such as those without a gradient, do not bound the next one.
LEAST_SHARE = 0.01
LEAST_NORM = 1e-8
# The mark of moments, 1 if channels are rows.
BY_ROWS = "by_rows"
MOMENTS = "exp_avg_projected", "exp_avg_sq_projected"


class Apollo(SummingOptimizer):
    """Per matrix X with gradient G [m, n], m <= n, or its transpose, at its step t:

        R = P G                            P [r, m] of entries N(0, 1/r), drawn anew every `period` steps
        M <- b1 M + (1 - b1) R             V <- b2 V + (1 - b2) R^2
        R' = M / (1 - b1^t) / (sqrt(V / (1 - b2^t)) + eps)
        U = G diag(s)                      s_j = |R'_j| / (|R_j| + 1e-8) for each of the n channels j
        U <- U min(1, limit N / |U|)       N = |U| of the step before
        X <- (1 - lr decay) (X - sqrt(scale) lr U)

    so that its state is 2 n r numbers, in place of AdamW's 2 m n. The limit replaces clipping. An update below a
    hundredth of N leaves N as it is, and N never becomes 0. All other tensors take AdamW's step, with the same lr.

    Under a host that cuts tensors, every rank draws P from (seed, name, period). One rank owns the moments of each
    channel. The other ranks with elements of the channel send it what their pieces add, in `codec`; it sends scales
    back in fp32, and each rank sends one number for each matrix.

    Args:
        params: named parameters, such as `model.named_parameters()`, or groups of them.
        matrices: a regular expression; projects the parameters of two dimensions whose names contain a match.
        rank: r; None: a quarter of m.
        scale: its root multiplies the updates; about m / r makes them as large as AdamW's.
        channels: "larger": along the larger dimension; "rows": always rows, with r and scale in relation to the number
            of columns. If ranks have whole rows then, only norms are summed over ranks.
        limit: 1 or more; None: none.

    State of a matrix: `step`, `norm` (N), `exp_avg_projected`, `exp_avg_sq_projected`, fp32 [channels, r]; of another
    tensor AdamW's.

    Raises ConfigError if `matrices` matches no matrix, for r above m, and for values out of range.
    Source: Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance" (MLSys 2025), algorithm 1; the limit: Chen et
    al., "Fira" (2024).
    """

    num_rounds = 2
    streams = starts_bare = True
    operation = "projected gradients"
    title = "apollo"
    # Whether a matrix has one scale.
    by_tensor: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        *,
        matrices: str = "attn|attention|mlp",
        rank: int | None = None,
        scale: float = 1.0,
        period: int = 200,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        limit: float | None = 1.01,
        channels: str = LARGER,
        codec: str = "fp32",
        seed: int = 0,
    ) -> None:
        self.codec, self.seed = codec_of_sums(self.title, codec), seed
        self._names: dict[Tensor, str] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        own = {"rank": rank, "scale": scale, "period": period, "limit": limit, "channels": channels}
        super().__init__(params, defaults | own)
        self._names = self._chosen(matrices)
        for group in self.param_groups:
            self._check(group)

    def _chosen(self, pattern: str) -> dict[Tensor, str]:
        """The names of the matrices to project. Raises ConfigError where there are none."""
        if any("param_names" not in group for group in self.param_groups):
            raise ConfigError(f"{self.title} draws projections by name: give model.named_parameters()")
        try:
            found = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{self.title} matrices {pattern!r}: not a regular expression: {error}") from None
        groups = self.param_groups
        named = {
            param: name
            for group in groups
            for param, name in zip(group["params"], group["param_names"], strict=True)
            if param.dim() == 2
        }
        chosen = {param: name for param, name in named.items() if found.search(name)}
        if not chosen:
            near = difflib.get_close_matches(pattern, named.values(), n=3, cutoff=0) or ["none"]
            raise ConfigError(
                f"{self.title} matrices {pattern!r}: matches the name of no two-dimensional parameter; nearest: "
                f"{', '.join(near)}"
            )
        return chosen

    def _check(self, group: dict[str, Any]) -> None:
        rank, scale, period, limit, channels = (group[k] for k in ("rank", "scale", "period", "limit", "channels"))
        known = LARGER, ROWS
        check_adamw(
            self.title, group,
            ("rank", rank, rank is None or rank >= 1, "at least 1; nearest: 1"),
            ("scale", scale, scale > 0, "above 0; nearest: 1"),
            ("period", period, period >= 1, "at least 1; the usual: 200"),
            ("limit", limit, limit is None or limit >= 1, "at least 1, or None; the usual: 1.01"),
            ("channels", channels, channels in known, f"one of {' and '.join(known)}{similar(channels, known)}"),
        )  # fmt: skip
        for param in (param for param in group["params"] if rank is not None and param in self._names):
            depth = Projection.of(self._whole(param, group)).depth
            if rank > depth:
                shape = "x".join(map(str, param.shape))
                raise ConfigError(
                    f"{self.title} rank {rank}: must be at most {depth}, the elements of a channel of "
                    f"{self._names[param]!r}, {shape}; nearest: {depth}"
                )

    def _whole(self, param: Tensor, group: Mapping[str, Any]) -> Part:
        return Part(self._names[param], param.shape, ((0, param.numel()),), 0, group)

    @property
    def limits_itself(self) -> bool:
        return all(group["limit"] is not None for group in self.param_groups)

    def name_of(self, param: Tensor) -> str:
        """The name by which the parameter's projections are drawn."""
        return self._names[param]

    def is_across(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the parameter is a matrix that `matrices` has matched."""
        return param in self._names

    def sums(self, parts: Mapping[str, Part]) -> dict[str, Sequence[dict[str, Sum]]]:
        """First the projections, sent to the owners of channels.

        Then scales, sent to ranks with their elements, and norms.
        """
        found: dict[str, Sequence[dict[str, Sum]]] = {}
        for name, part in parts.items():
            cut = Projection.of(part)
            touched, owned = ([of(rank) for rank in range(len(part.spans))] for of in (cut.touched, cut.owned))
            here = tuple((0, int(first < last)) for first, last in part.spans)
            first = {"projected": Sum(cut.rank, tuple(touched), tuple(owned), self.codec)}
            second = {"norms": Sum(3 if self.by_tensor else 1, here, here, Identity())}
            if not self.by_tensor:
                first["squares"] = Sum(1, tuple(touched), tuple(owned), Identity())
                second["scales"] = Sum(1, tuple(owned), tuple(touched), Identity())
            found[name] = first, second
        return found

    def num_kept(self, part: Part) -> int:
        """Both moments of the channels that this rank owns, and two numbers.

        0 if the rank has no element of the matrix.
        """
        cut, (start, stop) = Projection.of(part), part.own
        first, last = cut.owned(part.rank)
        return 2 * (last - first) * cut.rank + 2 if start < stop else 0

    def _kinds(self) -> dict[str, Any]:
        return {"step": 0, "norm": 0.0} | {kind: torch.empty(1) for kind in MOMENTS}

    def records_of(self, part: Part) -> dict[str, Record]:
        """The moments of the channels that this rank owns, a row each."""
        cut = Projection.of(part)
        first, last = cut.owned(part.rank)
        shape = torch.Size([last - first, cut.rank])
        return dict.fromkeys(MOMENTS, Record(shape, cut.num_channels * cut.rank, first * cut.rank))

    def marks(self, param: Tensor) -> dict[str, float]:
        """Whether channels are rows: a matrix may have as many moments by columns."""
        part = self.part_of(param)
        return {} if part is None else {BY_ROWS: float(Projection.of(part).by_rows)}

    def check_marks(self, param: Tensor, saved: Mapping[str, float]) -> None:
        """See SummingOptimizer."""
        part, own = self.part_of(param), self.marks(param).get(BY_ROWS)
        if part is not None and saved.get(BY_ROWS, own) != own:
            now, was = (ROWS, LARGER) if own else (LARGER, ROWS)
            raise ConfigError(
                f"{self.title} channels {now!r}: the checkpoint has moments of {part.name!r} by channels {was!r}; "
                f"nearest: {was}"
            )

    def _across(self, param: Tensor, grad: Tensor, part: Part, group: dict[str, Any]) -> Update:
        cut, state = Projection.of(part), self.state[param]
        first, last = cut.owned(part.rank)
        if not state:
            state |= {"step": 0, "norm": 0.0}
            state |= {kind: torch.zeros(last - first, cut.rank, device=grad.device) for kind in MOMENTS}
        # torch's load_state_dict gives them the parameter's dtype.
        state |= {kind: state[kind].float() for kind in MOMENTS}
        state["step"] += 1
        seed = derive_seed(named_seed(self.seed, part.name), (state["step"] - 1) // group["period"])
        projected, squares = cut.project(grad.reshape(-1).float(), part, seed)
        if self.by_tensor:
            totals = yield {"projected": projected}
            plain = totals["projected"]
            lengths = map(_squares, (self._adapted(plain, state, group), plain))
            totals = yield {"norms": torch.stack([*lengths, squares.sum(dtype=torch.float64)])[None].float()}
            adapted_norm, plain_norm, norm = totals["norms"][0].double().sqrt().tolist()
            scale = adapted_norm / (plain_norm + LEAST_NORM)
            scales, norm = torch.full((1, 1), scale, device=grad.device), scale * norm
        else:
            totals = yield {"projected": projected, "squares": squares}
            adapted = self._adapted(totals["projected"], state, group)
            own = adapted.norm(dim=1, keepdim=True) / (totals["projected"].norm(dim=1, keepdim=True) + LEAST_NORM)
            norms = (own.double().square() * totals["squares"]).sum()
            totals = yield {"scales": own, "norms": norms.view(1, 1).float()}
            scales, norm = totals["scales"], math.sqrt(float(totals["norms"]))
        factor = _limited(state, norm, group["limit"])
        cut.move(param, grad, part, scales, -group["lr"] * math.sqrt(group["scale"]) * factor)
        param.mul_(1 - group["lr"] * group["weight_decay"])

    def _adapted(self, projected: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """R', and the moments in their places."""
        (beta1, beta2), (mean, square) = group["betas"], (state[kind] for kind in MOMENTS)
        mean.lerp_(projected, 1 - beta1)
        square.mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
        spread = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        return (mean / (1 - beta1 ** state["step"])).div_(spread)


class ApolloMini(Apollo):
    """Apollo with one projected number a channel, and one scale for the whole matrix, by default at `scale` 128:

        U = s G        s = |R'| / (|R| + 1e-8)      norms of the matrices R' and R

    Its state is 2 n numbers a matrix. Source: see Apollo.
    """

    title = "apollo-mini"
    by_tensor = True

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        *,
        rank: int | None = 1,
        scale: float = 128.0,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, rank=rank, scale=scale, **options)


@dataclass(frozen=True)
class Projection:
    """How a matrix of [rows, columns] is projected, and which ranks hold and own its channels.

    by_rows: channels are rows, and columns are compressed; else the other way round. rank: r. spans: see Part.
    """

    rows: int
    columns: int
    by_rows: bool
    rank: int
    spans: tuple[PieceSpan, ...]

    @classmethod
    def of(cls, part: Part) -> Projection:
        """The projection of a parameter, from the options of its group."""
        rows, columns = part.shape
        by_rows = rows >= columns or part.options["channels"] == ROWS
        rank = part.options["rank"]
        return cls(rows, columns, by_rows, rank or max(1, (columns if by_rows else rows) // 4), part.spans)

    @property
    def num_channels(self) -> int:
        """Number of channels, n."""
        return self.rows if self.by_rows else self.columns

    @property
    def depth(self) -> int:
        """Elements of a channel, m."""
        return self.columns if self.by_rows else self.rows

    def touched(self, rank: int) -> PieceSpan:
        """The channels of which a rank has elements; where channels are columns: all, if it has any element."""
        first, last = self.spans[rank]
        if first == last:
            return 0, 0
        return (first // self.columns, -(-last // self.columns)) if self.by_rows else (0, self.columns)

    def owned(self, rank: int) -> PieceSpan:
        """The channels whose moments a rank owns: rows that begin in its piece, or its equal part of the columns."""
        first, last = self.spans[rank]
        if first == last:
            return 0, 0
        if self.by_rows:
            return -(-first // self.columns), -(-last // self.columns)
        holders = [at for at, span in enumerate(self.spans) if span[0] < span[1]]
        number, count = holders.index(rank), len(holders)
        return self.columns * number // count, self.columns * (number + 1) // count

    def project(self, grad: Tensor, part: Part, seed: int) -> tuple[Tensor, Tensor]:
        """What a piece adds to R^T, fp32 [touched, r], and to the sum of squares of each channel, fp32 [touched, 1]."""
        start, stop = self.touched(part.rank)
        projected, squares = grad.new_zeros(stop - start, self.rank), grad.new_zeros(stop - start, 1)
        for top, left, block in self._blocks(grad, part):
            down, across = slice(top, top + len(block)), slice(left, left + block.shape[1])
            channels, depth = (down, across) if self.by_rows else (across, down)
            oriented = block if self.by_rows else block.T
            own = slice(channels.start - start, channels.stop - start)
            projected[own].addmm_(oriented, self._draw(seed, depth, grad.device))
            squares[own] += torch.linalg.vector_norm(oriented, dim=1, keepdim=True).square()
        return projected, squares

    def move(self, param: Tensor, grad: Tensor, part: Part, scales: Tensor, factor: float) -> None:
        """param += factor G diag(s), for a piece. scales: fp32 [touched, 1], or a single one."""
        start, _ = self.touched(part.rank)
        for (top, left, into), (_, _, block) in zip(
            self._blocks(param.view(-1), part), self._blocks(grad.reshape(-1), part), strict=True
        ):
            own = scales
            if scales.numel() > 1:
                at, length = (top, len(block)) if self.by_rows else (left, block.shape[1])
                own = scales[at - start : at - start + length]
            into.add_(block * (own if self.by_rows else own.T), alpha=factor)

    def _draw(self, seed: int, elements: slice, device: torch.device) -> Tensor:
        """Rows `elements` of P^T, fp32 [elements, r]."""
        count = (elements.stop - elements.start) * self.rank
        drawn = normals(seed, elements.start * self.rank, count, device)
        return drawn.mul_(self.rank**-0.5).view(-1, self.rank)

    def _blocks(self, flat: Tensor, part: Part) -> Iterator[tuple[int, int, Tensor]]:
        """A flat piece as blocks of the matrix, (row, column, it): the end of a row, whole rows, the start of one."""
        first, last = part.own
        whole = min(-(-first // self.columns) * self.columns, last)
        ends = sorted({first, whole, max(whole, last // self.columns * self.columns), last})
        for start, stop in itertools.pairwise(ends):
            top, left = divmod(start, self.columns)
            yield top, left, flat[start - first : stop - first].view(-1, min(self.columns - left, stop - start))


def _squares(x: Tensor) -> Tensor:
    """Their sum, an fp64 scalar."""
    return x.double().square().sum()


def _limited(state: dict[str, Any], norm: float, limit: float | None) -> float:
    """What an update of this norm is multiplied by, so that it is at most `limit` times the last one; notes it."""
    last = state["norm"]
    factor = min(1.0, limit * last / norm) if limit is not None and last > 0 and norm > 0 else 1.0
    if norm * factor >= LEAST_SHARE * last:
        state["norm"] = norm * factor
    return factor
