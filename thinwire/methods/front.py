"""One class for a method's options and for the context around a loop of one's own."""

from __future__ import annotations

from dataclasses import fields
from functools import singledispatch
from typing import Any, ClassVar

from thinwire.errors import ConfigError


class Front:
    """Options that, given a model and its optimizer first, make the context that runs the method around a loop.

        DiLoCo(sync_every=100)                       the options, as `--strategy diloco` makes them
        DiLoCo(model, optimizer, sync_every=100)     the context; options that are not the method's are the context's

    A frozen dataclass derives from it. brings_step: whether the context takes the steps itself, without an optimizer.
    """

    brings_step: ClassVar[bool] = False

    def __new__(cls, *loop: Any, **options: Any) -> Any:
        if not loop:
            return super().__new__(cls)
        own_fields = fields(cls)  # type: ignore[arg-type]
        num_loop_arguments = 1 if cls.brings_step else 2
        loop, positional = loop[:num_loop_arguments], loop[num_loop_arguments:]
        own = dict(zip((item.name for item in own_fields if not item.kw_only), positional, strict=False))
        own |= {item.name: options.pop(item.name) for item in own_fields if item.name in options}
        return around(cls(**own), *loop, **options)


@singledispatch
def around(method: object, *loop: Any, **options: Any) -> Any:
    """The context that runs a method around a loop of one's own; each host registers itself for its kind of method.

    loop: the model, and the optimizer where the method needs one. options: the context's own. Raises ConfigError for a
    method that no loaded host runs.
    """
    raise ConfigError(f"no host that is loaded runs {type(method).__name__} around a loop: import thinwire.compose")
