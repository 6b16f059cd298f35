"""Errors for users: each has a message that is complete without a traceback."""

from __future__ import annotations

import difflib
import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
# Python counts booleans as numbers, but no user means them so.
NUMBERS: dict[Any, type] = {int: Integral, float: Real}


class ThinwireError(Exception):
    """A failure whose message says what happened, where, and what to do. The command line prints only the message."""

    exit_code = 1


class ConfigError(ThinwireError, ValueError):
    """Invalid input. The message names the value, the rule and the nearest valid choice (exit code 2)."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        """One error of all `problems`."""
        self.problems = problems
        listed = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(problems[0] if len(problems) == 1 else f"{len(problems)} problems:{listed}")


class Problems:
    """Collects every error in the configuration, so that the user sees all of them at once."""

    def __init__(self, messages: Iterable[str] = ()) -> None:
        self.messages = list(messages)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Note the block's ConfigError instead of raising it."""
        try:
            yield
        except ConfigError as error:
            self.messages += error.problems

    def note(self, check: Callable[..., T], *args: Any) -> T | None:
        """Call `check`. Return its result; if it raises ConfigError, note the error and return None."""
        with self.collect():
            return check(*args)
        return None

    def raise_any(self) -> None:
        """Raise one ConfigError with all messages, if there are any."""
        if self.messages:
            raise ConfigError(*dict.fromkeys(self.messages))


def nearest_divisor(size: int, total: int, most: float = math.inf) -> int:
    """The divisor of `total` that is nearest to `size`, the smaller of two, and at most `most`."""
    able = (n for n in range(1, total + 1) if total % n == 0 and n <= max(1, most))
    return min(able, key=lambda n: abs(n - size))


class UnsavedError(ThinwireError):
    """A run has ended, but its results could not be written. Starting it again would not help."""


class PeerLostError(ThinwireError, RuntimeError):
    """A rank died, froze or left. The message names the rank and the operation that it missed."""


class MismatchError(ThinwireError, RuntimeError):
    """Two ranks disagree about a message. The error states both sides' operation, sequence number and size."""


class CorruptMessageError(ThinwireError, RuntimeError):
    """A message arrived damaged. The error names sender, receiver, operation and number.

    Only this message is lost: ranks still agree on the next one, and may send it again.
    """

    def __init__(self, message: str, sender: int) -> None:
        super().__init__(message)
        self.sender = sender


def nearest(name: str, choices: Iterable[str]) -> str:
    """Tail of an error message: `; did you mean 'x'?` or the list of valid names."""
    known = sorted(choices)
    return similar(name, known) or f"; choose one of {', '.join(known)}"


def similar(name: str, choices: Iterable[str]) -> str:
    """Tail of an error message that lists the valid names already: `; did you mean 'x'?`, or empty."""
    known = sorted(choices)
    # A prefix is a better guess than a similar spelling: sdp4 means sdp4bit, not fsdp.
    begun = sorted((choice for choice in known if name and choice.startswith(name)), key=len)
    close = begun or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_few(names: Sequence[str], limit: int = 5) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def unusable_folder(folder: Path) -> str:
    """Why nothing can be written below this folder, which need not exist yet; empty if it can."""
    path, *above = (folder.absolute(), *folder.absolute().parents)
    try:
        while not path.exists():
            missing, path = path, above.pop(0)
            if path.is_dir() and os.access(path, os.W_OK | os.X_OK):
                # The kernel's own file systems let not even root do that.
                missing.mkdir(exist_ok=True)
                with suppress(OSError):
                    missing.rmdir()
                return ""
    except OSError as error:
        return f"no folder can be made in {path}: {error.strerror}"
    if not path.is_dir():
        return f"{path} is a file, not a folder"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} is not writable by this user"


def near_folder(folder: Path) -> str:
    """Tail of an error message about a folder that can't be used: one of the same name that can."""
    places = (parent / folder.name for parent in (Path(), Path(tempfile.gettempdir())))
    usable = next((place for place in places if not unusable_folder(place)), None)
    return f"; nearest: {usable}" if usable else "; choose another folder"


def type_name(hint: Any) -> str:
    """Name of a type in messages for users."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(type_name(option) for option in get_args(hint) if option is not NoneType)
    if get_origin(hint) is Literal:
        names = ", ".join(map(str, get_args(hint)))
        return names if len(get_args(hint)) == 1 else f"one of {names}"
    if get_origin(hint) is tuple:
        return f"a list of {type_name(get_args(hint)[0]).removeprefix('a ')}s"
    types = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return types.get(hint) or f"a {hint.__name__}"


def type_rule(value: Any, hint: Any, otherwise: str = "") -> str:
    """End of an error message about a value of another type: the rule, and the nearest whole number where one is asked.

    value: as given, or its text. otherwise: what follows the rule where the value has no nearest one.
    """
    rule = f"must be {type_name(hint)}"
    if isinstance(value, bool) or int not in (hint, *get_args(hint)):
        return rule + otherwise
    try:
        number = float(value)
        close = math.floor(number + 0.5) if number <= 0 else max(math.floor(number + 0.5), 1)
    except (TypeError, ValueError, OverflowError):
        return rule + otherwise
    return f"{rule}; nearest: {close}"


def check_types(options: Any) -> None:
    """Raise ConfigError for the first field of a dataclass whose value does not have the declared type.

    Without this check, "no" would be true, and 2.5 bits or a group of True would fail much later.
    """
    hints = hints_of(type(options))
    for item in fields(options):
        value = getattr(options, item.name)
        if not fits(value, hints[item.name]):
            what = f"{item.name} {value!r} of {type(options).__name__}"
            raise ConfigError(f"{what}: {type_rule(value, hints[item.name])}")


# Evaluating the text of annotations costs more than a small codec.
hints_of: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is valid for a field of this type. A whole number fits any number, a list fits a tuple."""
    if get_origin(hint) in (Union, UnionType):
        return any(fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(fits(item, get_args(hint)[0]) for item in value)
    if hint in NUMBERS:
        return isinstance(value, NUMBERS[hint]) and not isinstance(value, bool)
    return isinstance(value, hint)
