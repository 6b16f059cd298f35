"""The strategies: one row in STRATEGIES each.

`thinwire.NAME` is found here, by the name of the class; for type checkers by the `as` of its import.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from thinwire.errors import ConfigError, nearest
from thinwire.methods.data.demo import DeMo as DeMo
from thinwire.methods.data.dgc import DGC as DGC
from thinwire.methods.data.dion import Dion as Dion
from thinwire.methods.data.ef21 import EF21 as EF21
from thinwire.methods.data.feedback import EFInteger as EFInteger, EFTopK as EFTopK
from thinwire.methods.data.frontier import Frontier as Frontier
from thinwire.methods.data.fsdp import FSDP as FSDP
from thinwire.methods.data.lgreco import LGreCo as LGreCo
from thinwire.methods.data.one_byte import OneByte as OneByte
from thinwire.methods.data.onebit_adam import OneBitAdam as OneBitAdam
from thinwire.methods.data.powersgd import PowerSGD as PowerSGD
from thinwire.methods.data.sdp4bit import SDP4Bit as SDP4Bit
from thinwire.methods.data.sketch import Sketch as Sketch
from thinwire.methods.data.torch_powersgd import TorchPowerSGD as TorchPowerSGD
from thinwire.methods.data.two_way import TwoWay as TwoWay
from thinwire.methods.data.zero import Zero as Zero, ZeroBF16 as ZeroBF16
from thinwire.methods.data.zero_compressed import ZeroCompressed as ZeroCompressed
from thinwire.methods.data.zeropp import ZeroPP as ZeroPP
from thinwire.methods.interface import Method
from thinwire.methods.islands.dadao import DADAO
from thinwire.methods.islands.diloco import DiLoCo
from thinwire.methods.islands.fedfix import FedFix
from thinwire.methods.islands.gossip import Gossip
from thinwire.methods.islands.local_sgd import LocalSGD
from thinwire.methods.islands.sparseloco import SparseLoCo
from thinwire.methods.islands.streaming_diloco import StreamingDiLoCo
from thinwire.methods.plain_ddp import DDP as DDP

STRATEGIES: dict[str, Callable[..., Method]] = {
    "zero": Zero,
    "zero-bf16": ZeroBF16,
    "zero-compressed": ZeroCompressed,
    "sdp4bit": SDP4Bit,
    "sdp4bit-weights": partial(SDP4Bit, intra_gradients="fp32", inter_gradients="fp32", vector_gradients="fp32"),
    "sdp4bit-gradients": partial(SDP4Bit, weights="fp32", vector_weights="fp32"),
    "ddp": DDP,
    "ddp-bf16": partial(DDP, codec="bf16"),
    "powersgd": PowerSGD,
    "powersgd-torch": TorchPowerSGD,
    "two-way": TwoWay,
    "dgc": DGC,
    "demo": DeMo,
    "dion": Dion,
    "onebit-adam": OneBitAdam,
    "ef-topk": EFTopK,
    "ef-integer": EFInteger,
    "ef21": EF21,
    "lgreco-powersgd": partial(LGreCo, base=PowerSGD()),
    "lgreco-ef-topk": partial(LGreCo, base=EFTopK()),
    "lgreco-ef-integer": partial(LGreCo, base=EFInteger()),
    "lgreco-dgc": partial(LGreCo, base=DGC()),
    "sketch": Sketch,
    "fsdp": FSDP,
    "fsdp-bf16": partial(FSDP, codec="bf16"),
    "frontier": Frontier,
    "zeropp": ZeroPP,
    "one-byte": OneByte,
    "diloco": DiLoCo,
    "streaming-diloco": StreamingDiLoCo,
    "local-sgd": LocalSGD,
    "sparseloco": SparseLoCo,
    "fedfix": FedFix,
    "gossip": Gossip,
    "dadao": DADAO,
}


def class_of(strategy: str) -> type:
    """The dataclass of a strategy; none is made, which may load a compiler."""
    make: Any = STRATEGIES[strategy]
    cls: type = getattr(make, "func", make)
    return cls


def strategy_named(name: str, **options: object) -> Method:
    """The strategy registered under `name`; raises ConfigError that names the nearest one."""
    if name not in STRATEGIES:
        raise ConfigError(f"unknown strategy {name!r}{nearest(name, STRATEGIES)}")
    return STRATEGIES[name](**options)


def check_on_mesh(method: Method) -> None:
    """Raise ConfigError, which names those that can, for a method that can't train a model that a tensor axis cuts."""
    if method.not_on_mesh:
        able = [name for name in STRATEGIES if not strategy_named(name).not_on_mesh]
        raise ConfigError(
            f"{method.name} can't share a mesh with a tensor axis: it {method.not_on_mesh}; those that can: "
            f"{', '.join(able)}"
        )
