"""What others do with the rows of a layer of experts on their way, such as to watch them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire.errors import ConfigError, nearest

EVENTS = ("before_dispatch", "after_dispatch", "before_combine", "after_combine")
NAME = "row_hooks"
RowHook = Callable[[Tensor], Tensor | None]


class RowHooks:
    """Functions that are called with the rows of a layer; what they return takes the rows' place.

    before_dispatch: a rank's rows, sorted by expert, before they leave for their experts. after_dispatch: the rows that
    came to a rank's experts. before_combine: what these make of them. after_combine: what came back to the tokens'
    rank, before it is weighted and summed. Rows are [rows, hidden]; with several chunks the two in the middle are
    called for each. Source: Pan et al., "FSMoE" (ASPLOS 2025), section 3.
    """

    def __init__(self) -> None:
        # A handle refers weakly to what it removes from, which a plain dict does not allow.
        self._hooks: dict[str, OrderedDict[int, RowHook]] = {event: OrderedDict() for event in EVENTS}

    def add(self, event: str, hook: RowHook) -> RemovableHandle:
        """Call `hook` with the rows of each forward; the result has `remove`. Raises ConfigError for another event."""
        if event not in self._hooks:
            raise ConfigError(f"rows have no event {event!r}{nearest(event, EVENTS)}")
        hooks = self._hooks[event]
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def run(self, event: str, rows: Tensor) -> Tensor:
        """The rows after all hooks of an event, in the order in which they were added."""
        for hook in [*self._hooks[event].values()]:
            found = hook(rows)
            rows = rows if found is None else found
        return rows


def row_hooks(experts: nn.Module) -> RowHooks:
    """The hooks of one layer's experts.

    Args:
        experts: the module that a mixture calls with tokens, such as `model.model.layers[0].mlp.experts`. Hooks of
            experts of transformers run once these are spread by `expert_parallel`.
    """
    return vars(experts).setdefault(NAME, RowHooks())
