"""M-FAC: steps along the inverse Fisher matrix of the last gradients, over all parameters together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Identity
from thinwire.errors import ConfigError
from thinwire.optim.fisher import InverseFisher, combined, products
from thinwire.optim.sums import Part, Record, Sum, SummingOptimizer, Update, Values

# What the one sum of a step is called: no name of a parameter has a blank.
JOINT = "all parameters"
WINDOW, MOMENTUM = "window", "momentum_buffer"
# Of the window, how many numbers are read at once at most; a page has a multiple of PAGE_UNIT elements, or all.
PAGE_NUMEL, PAGE_UNIT = 1 << 21, 1024


class MFAC(SummingOptimizer):
    """With g the gradient of all parameters as one vector, and G the rows of the last m of them, this one too:

        F = damping I + (1/m) G^T G
        B <- momentum B + (1 - momentum) F^-1 g
        X <- (1 - lr decay) X - lr B

    m is `window`, and the number of gradients so far while that is less: so the first steps are not those of a nearly
    empty F, g / damping. F^-1 g = m G^T K^-1 e for K = m damping I + G G^T and the unit vector e of the newest row; K
    is m x m, and a step changes one row and column of it. So a host that cuts tensors sums the products of g with the
    window alone, m numbers: each rank sends its own in fp64 to all others, which add them up in the order of ranks. A
    parameter without a gradient counts as 0 in g and does not move.

    Args:
        params: tensors or groups, as for torch's optimizers; window and damping are the same in all groups.
        lr: of gradients that resemble each other little, the direction's norm is about m / |g|.
        window: m; each row takes as much memory as the weights.

    State: `step`, `window` fp32 [elements, m] and `momentum_buffer`. K is not saved: behind a load it is summed anew,
    once, in m - 1 further sums.

    Raises ConfigError for values outside of lr, weight_decay >= 0, damping > 0, window >= 1, 0 <= momentum < 1.
    Source: Frantar, Kurtic and Alistarh, "M-FAC: Efficient matrix-free approximations of second-order information"
    (NeurIPS 2021), section 4; it adds the decay to g instead.
    """

    title = "mfac"
    num_rounds = 1
    streams = starts_bare = True
    paged_kind = WINDOW
    operation = "products of gradients"
    codec = Identity()
    is_joint = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        *,
        window: int = 32,
        damping: float = 1e-5,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        given = {"lr": lr, "window": window, "damping": damping, "momentum": momentum, "weight_decay": weight_decay}
        self.window, self.damping = window, damping
        super().__init__(params, given)
        for group in self.param_groups:
            self._check(group)
        # G G^T, of these windows.
        self._gram = torch.empty(0, 0, dtype=torch.float64)
        self._windows: list[weakref.ref[Tensor]] = []

    def __getstate__(self) -> dict[str, Any]:
        """See SummingOptimizer; the windows of a copy are its own."""
        return super().__getstate__() | {"_windows": []}

    def _check(self, group: dict[str, Any]) -> None:
        window, damping, momentum = group["window"], group["damping"], group["momentum"]
        for option, is_good, rule in (
            ("lr", group["lr"] >= 0, "at least 0; nearest: 0"),
            ("window", window >= 1, "at least 1; nearest: 1"),
            ("window", window == self.window, f"the same in all groups; nearest: {self.window}"),
            ("damping", damping > 0, "above 0; the usual: 1e-5"),
            ("damping", damping == self.damping, f"the same in all groups; nearest: {self.damping}"),
            ("momentum", 0 <= momentum < 1, "at least 0 and below 1; the usual: 0.9"),
            ("weight_decay", group["weight_decay"] >= 0, "at least 0; nearest: 0"),
        ):
            if not is_good:
                raise ConfigError(f"mfac {option} {group[option]}: must be {rule}")

    def is_across(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """All parameters are one vector."""
        return True

    def sums(self, parts: Mapping[str, Part]) -> dict[str, Sequence[dict[str, Sum]]]:
        """One for all parameters: of each rank m products and its step, as two fp32 halves, to all ranks."""
        if not parts:
            return {}
        num_ranks, each = max(len(part.spans) for part in parts.values()), self.window + 1
        own = tuple((rank * each, (rank + 1) * each) for rank in range(num_ranks))
        return {JOINT: ({"products": Sum(2, own, ((0, num_ranks * each),) * num_ranks, Identity())},)}

    def num_kept(self, part: Part) -> int:
        """The window's rows and the momentum."""
        return (self.window + 1) * (part.own[1] - part.own[0])

    def num_paged(self, part: Part) -> int:
        """The window's rows."""
        return self.window * (part.own[1] - part.own[0])

    @property
    def page_bytes(self) -> int:
        """A multiple of a disk's block."""
        return 4 * self.window * max(1, PAGE_NUMEL // self.window // PAGE_UNIT) * PAGE_UNIT

    def _kinds(self) -> dict[str, Any]:
        return {"step": 0, WINDOW: torch.empty(1), MOMENTUM: torch.empty(1)}

    def records_of(self, part: Part) -> dict[str, Record]:
        """The window, whose rows here are elements, so that a piece of it is in one place."""
        (first, last), count = part.own, part.shape.numel()
        shape = torch.Size([last - first, self.window])
        return {WINDOW: Record(shape, count * self.window, first * self.window)}

    def _across(self, param: Tensor, grad: Tensor, part: Part, group: dict[str, Any]) -> Update:
        state, flat = self._held(param), grad.reshape(-1).float()
        total = torch.zeros(self.window, dtype=torch.float64, device=param.device)
        for rows, page in self.pages(state[WINDOW], changes=True):
            page[:, state["step"] % self.window] = flat[rows]
            total += products(page.T, flat[rows])
        totals = yield {"products": total}
        direction = torch.empty_like(flat)
        for rows, page in self.pages(state[WINDOW]):
            direction[rows] = combined(page.T, totals["weights"])
        momentum = self._momentum(param).lerp_(direction.view_as(param).to(param.dtype), 1 - group["momentum"])
        param.mul_(1 - group["lr"] * group["weight_decay"]).add_(momentum, alpha=-group["lr"])

    def _held(self, param: Tensor) -> dict[str, Any]:
        """The state of a parameter; of a new one, that of one without a gradient so far."""
        state = self.state[param]
        if not state:
            state["step"] = max((other["step"] for other in self.state.values() if other), default=0)
            state[WINDOW] = self._new_record(param, torch.Size([param.numel(), self.window]))
        # torch's load_state_dict gives it the parameter's dtype.
        state[WINDOW] = state[WINDOW].float()
        return state

    def _momentum(self, param: Tensor) -> Tensor:
        """That of a parameter that is in memory."""
        state = self.state[param]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(param)
        return state[MOMENTUM]

    def _totals(self, number: int, names: Sequence[str], sent: Sequence[Values]) -> list[Values]:
        """The weights of the window's rows, for every parameter."""
        held = {param: self._held(param) for param in self.matrices}
        windows, step = [state[WINDOW] for state in held.values()], max((s["step"] for s in held.values()), default=-1)
        for param, state in held.items():
            if param.grad is None:
                for _, page in self.pages(state[WINDOW], changes=True):
                    page[:, step % self.window] = 0
                if MOMENTUM not in state:
                    with self._brought(param):
                        self._momentum(param)
            state["step"] = step + 1
        is_same = [ref() is window for ref, window in zip(self._windows, windows, strict=False)]
        is_known = len(self._windows) == len(windows) and all(is_same)
        column, step, is_known = self._summed([values["products"] for values in sent], step, is_known)
        gram = self._gram.clone() if is_known else self._summed_anew(held, step)
        newest, count = step % self.window, min(step + 1, self.window)
        gram[newest] = gram[:, newest] = column
        self._gram, self._windows = gram, [weakref.ref(window) for window in windows]
        fisher = InverseFisher(gram.new_empty(count, 0), self.damping, gram=gram[:count, :count])
        weights = torch.zeros(self.window, dtype=torch.float64)
        weights[:count] = fisher.row_weights(newest)
        return [{"weights": weights}] * len(sent)

    def _summed_anew(self, held: Mapping[Tensor, Mapping[str, Any]], step: int) -> Tensor:
        """G G^T without the row of this step. held: the state of each parameter."""
        gram = torch.zeros(self.window, self.window, dtype=torch.float64)
        slots = [older % self.window for older in range(max(0, step + 1 - self.window), step)]
        device = next((param.device for param in held), gram.device)
        own = torch.zeros(len(slots), self.window, dtype=torch.float64, device=device)
        for state in held.values():
            of_one = torch.zeros_like(own)
            for _, page in self.pages(state[WINDOW]):
                for total, slot in zip(of_one, slots, strict=True):
                    total += products(page.T, page[:, slot])
            own += of_one
        for total, slot in zip(own, slots, strict=True):
            gram[slot] = gram[:, slot] = self._summed([total], step, True)[0]
        return gram

    def _summed(self, own: Sequence[Tensor], step: int, is_known: bool) -> tuple[Tensor, int, bool]:
        """The sum of products over parameters and ranks, fp64 [m], the step, and whether all ranks know their K.

        step: -1 of a rank without elements.
        """
        device = own[0].device if own else torch.device("cpu")
        total = torch.zeros(self.window, dtype=torch.float64, device=device)
        for values in own:
            total += values
        coarse = total.float()
        word = torch.tensor([[step, float(is_known)]], dtype=torch.float32, device=device)
        halves = torch.cat([torch.stack([coarse, (total - coarse).float()], dim=1), word])
        (found,) = super()._totals(0, [JOINT], [{"products": halves}])
        of_ranks = found["products"].view(-1, self.window + 1, 2).double().cpu()
        words = of_ranks[:, -1]
        return of_ranks[:, :-1].sum(-1).sum(0), int(words[:, 0].max()), bool(words[:, 1].all())
