"""One class for a method's options, and for the context that runs it around your own loop."""

from __future__ import annotations

from dataclasses import fields
from functools import singledispatch
from typing import Any, ClassVar

from thinwire.errors import ConfigError


class Front:
    """Options that become a context around a training loop if a model and its optimizer come first.

        DiLoCo(sync_every=100)                       the options, as `--strategy diloco` makes them
        DiLoCo(model, optimizer, sync_every=100)     the context; options that are not the method's are the context's

    A frozen dataclass derives from it. brings_step: the context takes the steps itself, without an optimizer.
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
    """The context that runs a method around a loop. Each host registers itself for its kind of method.

    loop: the model, and the optimizer if the method needs one. options: the context's own. Raises ConfigError if no
    host for the method is loaded.
    """
    raise ConfigError(f"no host that is loaded runs {type(method).__name__} around a loop: import thinwire.fronts")
