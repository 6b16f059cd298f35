"""Collects every configuration error, so that the user sees all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from thinwire.errors import ConfigError


class Problems:
    """A list of messages that becomes one ConfigError."""

    def __init__(self, messages: Iterable[str] = ()) -> None:
        self.messages = list(messages)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Note the block's ConfigError instead of raising it."""
        try:
            yield
        except ConfigError as error:
            self.messages.append(str(error))

    def raise_any(self) -> None:
        """Raise one ConfigError with all messages, if there are any."""
        if self.messages:
            raise ConfigError.of(self.messages)
