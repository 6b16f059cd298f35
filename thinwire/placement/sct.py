"""m-SCT: a device that has run an operation waits for its favourite child."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from thinwire.errors import ConfigError
from thinwire.placement.board import DeviceSchedule
from thinwire.placement.etf import EarliestFirst
from thinwire.placement.graph import Devices, OpGraph


def _scipy() -> Any:
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError:
        raise ConfigError(
            "m-sct needs the package scipy for its linear programme: pip install -e '.[plan]' in thinwire's folder; "
            "nearest without it: m-etf"
        ) from None
    return scipy


def relaxed(graph: OpGraph, devices: Devices) -> tuple[dict[tuple[int, int], float], float]:
    """x of each edge, from 0 to 1, and w, of the relaxed problem of favourite children with unlimited devices.

        minimise w   subject to   s_i + p_i + c_ij x_ij <= s_j   for each edge
                                  sum_j x_ij >= outdeg(i) - 1,   sum_i x_ij >= indeg(j) - 1,   s_i + p_i <= w

    x_ij is 0 if j runs on the device of i, without a message. If c is at most p, w is a lower bound of all schedules.
    Edges inside a group cost nothing and have no x. Raises ConfigError without scipy.
    Source: Hanen and Munier, "An approximation algorithm for scheduling dependent tasks on m processors with small
    communication delays" (1995); "Baechi" (SoCC 2020), section 3.3.
    """
    scipy = _scipy()
    num, inside = len(graph.ops), graph.group_of
    edges = sorted(graph.edges)
    free = [edge for edge in edges if inside[edge[0]] != inside[edge[1]]]
    column = {edge: num + 1 + number for number, edge in enumerate(free)}
    seconds = [op.seconds / devices.mean_speed for op in graph.ops]
    rows: list[list[tuple[int, float]]] = []
    bounds: list[float] = []
    for i, j in edges:
        crossing = [(column[i, j], graph.seconds_between(i, j, devices))] if (i, j) in column else []
        rows.append([(i, 1.0), (j, -1.0), *crossing])
        bounds.append(-seconds[i])
    for end in (0, 1):
        sides: dict[int, list[int]] = defaultdict(list)
        for edge in free:
            sides[edge[end]].append(column[edge])
        for own in sides.values():
            rows.append([(each, -1.0) for each in own])
            bounds.append(1.0 - len(own))
    for op in range(num):
        rows.append([(op, 1.0), (num, -1.0)])
        bounds.append(-seconds[op])
    where = [(row, col, value) for row, each in enumerate(rows) for col, value in each]
    matrix = scipy.sparse.csr_array(
        ([value for *_, value in where], ([row for row, *_ in where], [col for _, col, _ in where])),
        shape=(len(rows), num + 1 + len(free)),
    )
    costs = [0.0] * num + [1.0] + [0.0] * len(free)
    limits = [(0.0, None)] * (num + 1) + [(0.0, 1.0)] * len(free)
    found = scipy.optimize.linprog(costs, A_ub=matrix, b_ub=bounds, bounds=limits, method="highs")
    assert found.success, found.message
    return {edge: float(found.x[each]) for edge, each in column.items()}, float(found.x[num])


def favourites(graph: OpGraph, devices: Devices) -> dict[int, int]:
    """The favourite child of each operation that has one; no two operations have the same.

    Edges with x below 0.5 are favourites. Rounding may give an operation two favourites, or two operations the same.
    The edge with the smallest x then counts; ties go to the one with the most seconds, then to the first.
    """
    x, _ = relaxed(graph, devices)
    below = [edge for edge, value in x.items() if value < 0.5]
    found: dict[int, int] = {}
    taken: set[int] = set()
    for i, j in sorted(
        below, key=lambda edge: (round(x[edge], 9), -graph.seconds_between(edge[0], edge[1], devices), edge)
    ):
        if i not in found and j not in taken:
            found[i] = j
            taken.add(j)
    return found


class SmallCommunication(EarliestFirst):
    """One run of m-SCT. A device is awake while it waits for the favourite child of its last operation."""

    def __init__(self, graph: OpGraph, devices: Devices) -> None:
        super().__init__(graph, devices)
        self.favourite = favourites(graph, devices)
        self._last: list[int | None] = [None] * devices.num
        self._awaited: list[int | None] = [None] * devices.num

    def begin_moment(self) -> None:
        board = self.board
        for device in range(self.devices.num):
            self._awaited[device] = self._awaits(device) if board.free_s[device] <= self.now_s else None

    def _end(self, op: int) -> None:
        super()._end(op)
        home = self.board.homes[op]
        assert home is not None
        # After an urgent operation without a favourite child it waits on.
        if op in self.favourite:
            self._last[home] = op

    def _awaits(self, device: int) -> int | None:
        """The favourite child that a device waits for, or None.

        A device waits if the ends of all the child's parents are known, it has memory for the child, and the child
        could start nowhere earlier.
        """
        last = self._last[device]
        child = self.favourite.get(last) if last is not None else None
        if child is None or self.board.homes[child] is not None:
            return None
        parents = {self.graph.values[value].source for value in self.graph.inputs[child]}
        if any(self.board.homes[parent] is None for parent in parents) or not self.board.fits(child, device):
            return None
        starts = [self.start_s(child, each) for each in range(self.devices.num)]
        return child if starts[device] <= min(starts) else None

    def may_s(self, op: int, device: int) -> float:
        """When an operation may start. On an awake device only the awaited one may, and urgent ones.

        An operation is urgent if it could start on any device by now.
        """
        if self._awaited[device] in (None, op):
            return self.now_s
        return max(self.board.ready_s(op, each) for each in range(self.devices.num))


def m_sct(graph: OpGraph, devices: Devices) -> DeviceSchedule:
    """Small communication times, with memory: m-ETF, in which devices wait for favourite children.

    With unlimited devices and memory, and messages that take at most rho times the shortest operation, rho at most 1, a
    schedule takes at most (2 + 2 rho) / (2 + rho) times the optimum. Raises NoRoomError, and ConfigError without scipy.
    Source: "Baechi" (SoCC 2020), section 3.3.
    """
    return SmallCommunication(graph, devices).run()
