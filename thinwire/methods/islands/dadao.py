"""DADAO: accelerated optimisation of convex functions over a graph, with no step in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.methods.options import check_types
from thinwire.methods.own_pace.graph import Graph, Mixing
from thinwire.methods.own_pace.pairs import PairsMethod
from thinwire.table import Row

X, X_TILDE, Y, Y_TILDE, Z, Z_TILDE = range(6)


@dataclass(frozen=True, eq=False)
class DadaoLaw:
    """The constants and the events of DADAO, on states [6, n] of x, x~, y, y~, z, z~.

    With nu = mu / 2, s = sqrt(nu / L), and lam = sqrt(2 chi1 chi2) meetings and one gradient a node in a unit of time:

        x' = s/8 (x~ - x)    x~' = s/8 (x - x~)       y' = s/4 (y~ - y)    y~' = -1/(2 s) (y + z + nu x~)
        z' = s/4 (z~ - z)    z~' = s/8 (z - z~)                                                   in between
        d = grad f(x) - nu x - y~;  x -= d / (4 L);  x~ -= d / (4 sqrt(L nu));  y~ += (s/4 + 1) d    at a gradient
        m = (y_i + z_i) - (y_j + z_j);  z_i -= m / 2;  z~_i -= 2 chi1 / (lam s) m                    at a meeting

    Every f_i must be L-smooth and mu-strongly convex. Sums over nodes of z and z~ stay zero, all at one time.

    Source: Nabli and Oyallon, "DADAO: Decoupled Accelerated Decentralized Asynchronous Optimization", ICML 2023.
    """

    graph: Graph
    smoothness: float
    strong_convexity: float

    def __post_init__(self) -> None:
        check_constants(self.smoothness, self.strong_convexity)

    @property
    def nu(self) -> float:
        return self.strong_convexity / 2

    @property
    def root(self) -> float:
        """s."""
        return math.sqrt(self.nu / self.smoothness)

    @property
    def rate(self) -> float:
        """lam."""
        return math.sqrt(2 * self.graph.chi1 * self.graph.chi2)

    @property
    def mixing(self) -> Mixing:
        s = self.root
        eta, alpha, alpha_tilde, theta = s / 8, s / 4, s / 8, 0.5 / s
        matrix = torch.zeros(6, 6, dtype=torch.float64)
        matrix[X, X], matrix[X, X_TILDE] = -eta, eta
        matrix[X_TILDE, X], matrix[X_TILDE, X_TILDE] = eta, -eta
        matrix[Y, Y], matrix[Y, Y_TILDE] = -alpha, alpha
        matrix[Y_TILDE, Y] = matrix[Y_TILDE, Z] = -theta
        matrix[Y_TILDE, X_TILDE] = -theta * self.nu
        matrix[Z, Z], matrix[Z, Z_TILDE] = -alpha, alpha
        matrix[Z_TILDE, Z], matrix[Z_TILDE, Z_TILDE] = alpha_tilde, -alpha_tilde
        return Mixing(matrix)

    def start(self, x: Tensor) -> Tensor:
        state = torch.zeros(6, x.numel(), dtype=x.dtype)
        state[X] = x
        return state

    def gradient_(self, state: Tensor, gradient: Tensor) -> None:
        """Apply the gradient of f at x."""
        d = gradient - self.nu * state[X] - state[Y_TILDE]
        state[X].sub_(d, alpha=1 / (4 * self.smoothness))
        state[X_TILDE].sub_(d, alpha=1 / (4 * math.sqrt(self.smoothness * self.nu)))
        state[Y_TILDE].add_(d, alpha=self.root / 4 + 1)

    def message(self, state: Tensor) -> Tensor:
        return state[Y] + state[Z]

    def meet_(self, state: Tensor, difference: Tensor) -> None:
        state[Z].sub_(difference, alpha=0.5)
        state[Z_TILDE].sub_(difference, alpha=2 * self.graph.chi1 / (self.rate * self.root))


@dataclass(frozen=True)
class DADAO(PairsMethod):
    """Minimise sum_i f_i, one convex function per rank, over a graph, without an optimizer.

    Each rank applies its gradient when it can, at the time of that step. All x_i approach the minimiser of the sum,
    whatever the graph and the ranks' speeds. At the end all ranks have the mean of the x_i.

    `DADAO(model, **options)` is the optimizer of your own loop, and a context that all ranks enter: call its `step()`
    after backward, and `zero_grad()`. Its other options: `group`, `seed`, `timeout_s`, `checked`, `announce`.

    Raises ConfigError for options that can't work or differ between ranks; PeerLostError, in `step()`, if a neighbour
    is lost.
    Source: Nabli and Oyallon, "DADAO", ICML 2023.
    """

    name: ClassVar[str] = "dadao"
    brings_step: ClassVar[bool] = True
    num_vectors: ClassVar[int] = 7
    rows: ClassVar[tuple[Row, ...]] = (
        ("--optimizer, --lr, --weight-decay", "no effect", "steps follow from smoothness and strong_convexity"),
        ("guarantee", "none where the loss is not convex", "as that of a neural network is not"),
    )

    smoothness: float = 10.0
    """Smoothness L of every f_i, the most that its gradient changes per unit of distance; at least strong_convexity."""
    strong_convexity: float = 1.0
    """Strong convexity mu of every f_i; above 0."""
    step_s: float = 0.1
    """Seconds of a gradient, above 0: the unit of time. Ranks that are faster wait."""
    graph: str | tuple[tuple[int, int], ...] = "ring"
    """Which ranks exchange with which: ring, star, complete, or a list of edges such as (0, 1) between two ranks."""

    def __post_init__(self) -> None:
        check_types(self)
        self.check_step()
        check_constants(self.smoothness, self.strong_convexity)

    @property
    def optimizers(self) -> tuple[str, ...]:
        return ("sgd-plain",)

    @property
    def optimizers_reason(self) -> str:
        return "takes gradients in by its own law, and leaves an optimizer nothing to do"

    def law(self, num_nodes: int) -> DadaoLaw:
        return DadaoLaw(Graph.of(self.graph, num_nodes), self.smoothness, self.strong_convexity)


def check_constants(smoothness: float, strong_convexity: float) -> None:
    """Raise ConfigError for constants that no function can have."""
    if not 0 < strong_convexity <= smoothness:
        raise ConfigError(
            f"strong_convexity {strong_convexity:g}, smoothness {smoothness:g}: the first above 0 and at most the "
            "second"
        )
