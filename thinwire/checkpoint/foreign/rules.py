"""The rules: which parameters a rule applies to, how ranks hold them, and what they become."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.checkpoint.foreign.layouts import RankLayout, Unique
from thinwire.checkpoint.foreign.sources import ForeignSource
from thinwire.errors import ConfigError, first_few


def whole(tensor: Tensor) -> list[Tensor]:
    """The tensor, as one part."""
    return [tensor]


@dataclass(frozen=True)
class Rule:
    r"""Rule for the parameters whose whole name matches the regular expression `pattern`.

    Args:
        layout: how ranks hold the parameters.
        num_rows: rows of dimension 0 to keep; the others are padding of the vocabulary.
        cut: turns the whole tensor into as many parts as `to` has names.
        to: the new names, where \1 is the first group of the pattern. Without names, the parameters are not read.
    """

    pattern: str
    to: tuple[str, ...] = (r"\g<0>",)
    layout: RankLayout = field(default_factory=Unique)
    num_rows: int | None = None
    cut: Callable[[Tensor], Sequence[Tensor]] = whole

    def names(self, name: str) -> list[str]:
        """New names of a parameter whose name matches."""
        match = re.fullmatch(self.pattern, name)
        assert match is not None
        return [match.expand(target) for target in self.to]

    def parts(self, shards: Sequence[Tensor]) -> Sequence[Tensor]:
        """The whole tensors, one for each new name, in the dtype of the shards."""
        joined = self.layout.join(shards)
        if self.num_rows is not None:
            if len(joined) < self.num_rows:
                raise ConfigError(f"{len(joined)} rows, and the config asks for {self.num_rows}")
            joined = joined[: self.num_rows]
        return self.cut(joined)


def left_out(pattern: str) -> Rule:
    """A rule for entries that are not weights: optimizer states, tables that are computed anew."""
    return Rule(pattern, to=())


def assign(names: Iterable[str], rules: Sequence[Rule]) -> dict[str, Rule]:
    """The rule of each name. Raises ConfigError with the names that match no rule or more than one."""
    found = {name: [rule for rule in rules if re.fullmatch(rule.pattern, name)] for name in names}
    if unknown := [name for name, matches in found.items() if not matches]:
        raise ConfigError(
            f"no rule matches {first_few(unknown)}: add one that says how ranks hold them, or leave them out"
        )
    if doubtful := [name for name, matches in found.items() if len(matches) > 1]:
        patterns = ", ".join(repr(rule.pattern) for rule in found[doubtful[0]])
        raise ConfigError(
            f"more than one rule matches {first_few(doubtful)} ({patterns}): make the patterns exclude each other"
        )
    return {name: matches[0] for name, matches in found.items()}


def consolidate(source: ForeignSource, rules: Sequence[Rule]) -> Iterator[tuple[str, Tensor]]:
    """Yield (new name, whole fp32 tensor), one parameter at a time, so that only one is in memory.

    Before it reads anything, it raises ConfigError for names that `assign` refuses and for two parameters with the same
    new name. Later it raises ConfigError, with the parameter's name, for shards that contradict their rule.
    """
    assigned = {name: rule for name, rule in assign(source.names(), rules).items() if rule.to}
    givers: dict[str, str] = {}
    for name, rule in assigned.items():
        for target in rule.names(name):
            if (other := givers.setdefault(target, name)) != name:
                raise ConfigError(f"both {other} and {name} would become {target}: leave one of them out")
    for name, rule in assigned.items():
        try:
            parts = rule.parts(source.shards(name))
        except (ConfigError, RuntimeError) as error:
            raise ConfigError(f"{name}: {error}") from error
        for target, part in zip(rule.names(name), parts, strict=True):
            yield target, part.float()
