"""Expert parallelism in transformers: its mixtures send the rows of their experts through thinwire."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives import Communicator, Meter
from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.collectives.two_hops import Rooms
from thinwire.errors import ConfigError
from thinwire.hosts.experts.checks import check_groups
from thinwire.hosts.experts.trip import ExpertWire, Trip
from thinwire.methods.experts import ExpertParallel, ExpertPlacement
from thinwire.models.order import Order

NAME = "thinwire"
EPImplementation: Any = object
missing: ImportError | None = None
try:
    from transformers.distributed import expert_parallel as theirs

    EPImplementation = theirs.EPImplementation
except ImportError as error:
    missing = error


class TransformersExperts:
    """Brings rows to the experts of transformers' mixtures; made by `register_experts`.

    Attributes:
        meter: counts "dispatch", "combine" and their gradients, of all layers.
    """

    def __init__(self, options: ExpertParallel, local_size: int | None, seed: int, timeout_s: float) -> None:
        self.options, self.meter, self._seed = options, Meter(), seed
        self._make = partial(Communicator, local_size=local_size, timeout_s=timeout_s, meter=self.meter)
        self._comms: dict[tuple[int, ...], Communicator] = {}

    def __call__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> RowsToExperts:
        """Called by transformers on all ranks, once for each layer.

        Raises ConfigError for options that don't fit the model.
        """
        if tp_mesh.size() > 1:
            raise ConfigError(
                f"ep_implementation {NAME!r} with tp_size {tp_mesh.size()}: each rank needs a batch of its own; "
                "nearest: tp_size 1, and fsdp_size"
            )
        width: int = experts.hidden_dim
        check_groups(self.options, width)
        key = tuple(ep_mesh.mesh.tolist())
        if key not in self._comms:
            self._comms[key] = self._make(ep_mesh)
        return RowsToExperts(experts, ep_mesh, tp_mesh, self._wire(self._comms[key], experts, width))

    def _wire(self, comm: Communicator, experts: Any, width: int) -> ExpertWire:
        options, ranks = self.options.fitted(width), comm.world_size
        first, *others = comm.global_ranks
        grid = comm.topology
        has_hops = options.route == "2dh" and min(grid.num_nodes, grid.local_size) > 1
        return ExpertWire(
            comm, ExpertPlacement(experts.num_experts * ranks, ranks), range(ranks), options.codec("dispatch"),
            options.codec("combine"), options.codec("gradients"), first=first,
            step=others[0] - first if others else 1, seed=self._seed, num_chunks=options.num_chunks,
            num_back=options.num_back,
            hops=[Rooms() for _ in range(max(options.num_chunks, options.num_back))] if has_hops else (),
        )  # fmt: skip

    def close(self) -> None:
        """Wait for all communication and give the process groups back."""
        for comm in self._comms.values():
            comm.close()


class RowsToExperts(EPImplementation):
    """One layer: sends each token's rows to the ranks of its experts and back, then weights the results."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, wire: ExpertWire) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.wire = wire

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum over each token's experts, [tokens, hidden]. A collective."""
        order = Order.of(top_k_index, self.wire.placement.experts)
        numbers = self.wire.row_numbers(order, self.wire.own_tokens(len(hidden_states)))
        rows = Trip(self.wire, order.counts, numbers).through(order.encode(hidden_states), self._work)
        return order.decode(rows * top_k_weights.flatten()[order.choices, None].to(rows.dtype), len(hidden_states))

    def _work(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The outputs of this rank's experts for rows that are sorted by expert."""
        num_rows = len(rows)
        numbers = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
        if not num_rows:
            # What wraps the experts waits for gradients of their weights on every rank.
            rows, numbers = rows.sum(0, keepdim=True), numbers.new_zeros(1)
        found: Tensor = self.experts_forward(rows, numbers[:, None], rows.new_ones(len(rows), 1))
        return found[:num_rows]


def register_experts(
    options: ExpertParallel | None = None, *, local_size: int | None = None, seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> TransformersExperts:  # fmt: skip
    """Let transformers send rows through thinwire: `DistributedConfig(ep_size=4, ep_implementation="thinwire")`.

    Call it before the model is loaded.

    Args:
        options: codecs, chunks, and the route: linear or 2dh. `ep_size` sets the number of ranks that share the
            experts.
        local_size: ranks per node; None: found from the launcher or host names.
        seed: of the codecs' randomness.
        timeout_s: see Communicator.

    Raises ConfigError for a version of transformers without a registry of expert parallelism, and for options that only
    thinwire's own mixtures have.
    """
    if missing is not None:
        raise ConfigError(f"expert parallelism of transformers needs transformers 5.23: {missing}")
    options = options or ExpertParallel()
    options.check_stated()
    stated = {"parallel": options.parallel, "slices": options.slices, "move": options.move}
    for name, plain in (("parallel", 1), ("slices", 1), ("move", "tokens")):
        if stated[name] != plain:
            why = "ep_size says it" if name == "parallel" else "transformers has whole experts on a rank"
            raise ConfigError(f"{name} {stated[name]!r} for transformers: {why}; nearest: {plain!r}")
    if options.route == "once":
        raise ConfigError("route 'once' for transformers: their experts add nothing up; nearest: '2dh'")
    made = TransformersExperts(options, local_size, seed, timeout_s)
    theirs.EPImplementationInterface.register(NAME, made)
    return made
