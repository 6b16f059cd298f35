"""DADAO: accelerated optimisation of convex functions over a graph, with no step in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives import Communicator
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.errors import ConfigError
from thinwire.methods.islands.gossip import PairwiseGossip
from thinwire.methods.islands.graph import Edge, Graph, Mixing
from thinwire.state.replicas import fitting_parameters
from thinwire.table import announce as announce_table

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
        if not 0 < self.strong_convexity <= self.smoothness:
            raise ConfigError(
                f"strong_convexity {self.strong_convexity:g}, smoothness {self.smoothness:g}: the first above 0 and at "
                "most the second"
            )

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
        """Take in the gradient of f at x."""
        d = gradient - self.nu * state[X] - state[Y_TILDE]
        state[X].sub_(d, alpha=1 / (4 * self.smoothness))
        state[X_TILDE].sub_(d, alpha=1 / (4 * math.sqrt(self.smoothness * self.nu)))
        state[Y_TILDE].add_(d, alpha=self.root / 4 + 1)

    def message(self, state: Tensor) -> Tensor:
        return state[Y] + state[Z]

    def meet_(self, state: Tensor, difference: Tensor) -> None:
        state[Z].sub_(difference, alpha=0.5)
        state[Z_TILDE].sub_(difference, alpha=2 * self.graph.chi1 / (self.rate * self.root))


class DADAO(PairwiseGossip):
    """Minimise sum_i f_i, one convex function a rank, over a graph; the optimizer of one's own loop, and a context.

    Each rank calls `step()` after backward, when it can; a gradient is taken in at the time of that call. All x_i
    approach the minimiser of the sum, whatever the graph and whatever the ranks' speeds. On leaving the context the
    model is the mean of the x_i on all ranks.

    smoothness, strong_convexity: L and mu of every f_i. graph: "ring", "star", "complete" or a list of edges. step_s:
    seconds of a gradient, the unit of time: ranks that are faster wait. Raises ConfigError for options that can't work
    or differ between ranks; PeerLostError, in `step()`, where a neighbour is lost.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        smoothness: float,
        strong_convexity: float,
        step_s: float,
        graph: str | Sequence[Edge] = "ring",
        group: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checked: bool = False,
        announce: bool = True,
    ) -> None:
        parameters = [param for param in model.parameters() if param.requires_grad]
        trained = fitting_parameters(model, torch.optim.SGD(parameters, lr=1.0))
        comm = Communicator(group, local_size=1, timeout_s=timeout_s, checked=checked)
        net = Graph.of(graph, comm.world_size)
        self._law = DadaoLaw(net, smoothness, strong_convexity)
        super().__init__(model, trained, comm, net, self._law, step_s, seed)
        if announce and comm.rank == 0:
            announce_table(self.describe())

    def step(self) -> None:
        """Take in the gradient, and write the new x into the model."""
        gradient = self._model.gradient()
        self.pace()
        with self._background.changed:
            self.bring_to_(self.now())
            self._law.gradient_(self.state, gradient)
            x = self.state[X].clone()
        self._model.write(x)
        self.steps += 1

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for tensor in self._model.tensors:
            tensor.grad = None
