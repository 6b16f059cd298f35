"""The strategies: one row each in STRATEGIES.

`thinwire.NAME` looks up a class here by its name; type checkers find it through the `as` of its import. A class is
loaded on first use, so that listing names does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError, nearest

if TYPE_CHECKING:
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
    from thinwire.methods.plain_ddp import DDP as DDP

    # With a model first they make a context around a loop, else a method's options: no type says both.
    DADAO: Any
    DiLoCo: Any
    FedFix: Any
    Gossip: Any
    LocalSGD: Any
    MuLoCo: Any
    SparseLoCo: Any
    StreamingDiLoCo: Any


class StrategyRow:
    """A strategy: its class in `thinwire.methods`, as module:class, and options that differ from the class's own.

    An option may itself be a row; its value is then the strategy of that row.
    """

    def __init__(self, place: str, **keywords: Any) -> None:
        self.module, _, self.name = place.partition(":")
        self._keywords = keywords

    @property
    def cls(self) -> type:
        """The dataclass. No instance is made, because that may load a compiler."""
        cls: type = getattr(import_module(f"thinwire.methods.{self.module}"), self.name)
        return cls

    @property
    def keywords(self) -> dict[str, Any]:
        """The options of the row, as keyword arguments."""
        return {name: value() if isinstance(value, StrategyRow) else value for name, value in self._keywords.items()}

    def __call__(self, **options: Any) -> Method:
        """The strategy with these options, which override those of the row."""
        method: Method = self.cls(**{**self.keywords, **options})
        return method


STRATEGIES: dict[str, StrategyRow] = {
    "zero": StrategyRow("data.zero:Zero"),
    "zero-bf16": StrategyRow("data.zero:ZeroBF16"),
    "zero-compressed": StrategyRow("data.zero_compressed:ZeroCompressed"),
    "sdp4bit": StrategyRow("data.sdp4bit:SDP4Bit"),
    "sdp4bit-weights": StrategyRow(
        "data.sdp4bit:SDP4Bit", intra_gradients="fp32", inter_gradients="fp32", vector_gradients="fp32"
    ),
    "sdp4bit-gradients": StrategyRow("data.sdp4bit:SDP4Bit", weights="fp32", vector_weights="fp32"),
    "ddp": StrategyRow("plain_ddp:DDP"),
    "ddp-bf16": StrategyRow("plain_ddp:DDP", codec="bf16"),
    "powersgd": StrategyRow("data.powersgd:PowerSGD"),
    "powersgd-torch": StrategyRow("data.torch_powersgd:TorchPowerSGD"),
    "two-way": StrategyRow("data.two_way:TwoWay"),
    "dgc": StrategyRow("data.dgc:DGC"),
    "demo": StrategyRow("data.demo:DeMo"),
    "dion": StrategyRow("data.dion:Dion"),
    "onebit-adam": StrategyRow("data.onebit_adam:OneBitAdam"),
    "ef-topk": StrategyRow("data.feedback:EFTopK"),
    "ef-integer": StrategyRow("data.feedback:EFInteger"),
    "ef21": StrategyRow("data.ef21:EF21"),
    "lgreco-powersgd": StrategyRow("data.lgreco:LGreCo", base=StrategyRow("data.powersgd:PowerSGD")),
    "lgreco-ef-topk": StrategyRow("data.lgreco:LGreCo", base=StrategyRow("data.feedback:EFTopK")),
    "lgreco-ef-integer": StrategyRow("data.lgreco:LGreCo", base=StrategyRow("data.feedback:EFInteger")),
    "lgreco-dgc": StrategyRow("data.lgreco:LGreCo", base=StrategyRow("data.dgc:DGC")),
    "sketch": StrategyRow("data.sketch:Sketch"),
    "fsdp": StrategyRow("data.fsdp:FSDP"),
    "fsdp-bf16": StrategyRow("data.fsdp:FSDP", codec="bf16"),
    "frontier": StrategyRow("data.frontier:Frontier"),
    "zeropp": StrategyRow("data.zeropp:ZeroPP"),
    "one-byte": StrategyRow("data.one_byte:OneByte"),
    "diloco": StrategyRow("islands.diloco:DiLoCo"),
    "streaming-diloco": StrategyRow("islands.streaming_diloco:StreamingDiLoCo"),
    "local-sgd": StrategyRow("islands.local_sgd:LocalSGD"),
    "sparseloco": StrategyRow("islands.sparseloco:SparseLoCo"),
    "muloco": StrategyRow("islands.muloco:MuLoCo"),
    "fedfix": StrategyRow("islands.fedfix:FedFix"),
    "gossip": StrategyRow("islands.gossip:Gossip"),
    "dadao": StrategyRow("islands.dadao:DADAO"),
}


def class_of(strategy: str) -> type:
    """The dataclass of a strategy."""
    return STRATEGIES[strategy].cls


def check_name(flag: str, name: str) -> None:
    """Raise ConfigError that names the nearest strategy, if no strategy has the name stated for `flag`."""
    head, bracket, _ = name.partition("[")
    if bracket and head in STRATEGIES:
        raise ConfigError(
            f"{flag} {name}: options in brackets are for races, thinwire compare; nearest: {flag} {head}, and each "
            f"option as a flag of its own, which thinwire train --help-all lists"
        )
    if name not in STRATEGIES:
        raise ConfigError(f"{flag} {name}: no such strategy{nearest(name, STRATEGIES)}")


def strategy_named(name: str, **options: object) -> Method:
    """The strategy registered under `name`. Raises ConfigError that names the nearest one."""
    if name not in STRATEGIES:
        raise ConfigError(f"unknown strategy {name!r}{nearest(name, STRATEGIES)}")
    return STRATEGIES[name](**options)


def check_on_mesh(method: Method) -> None:
    """Raise ConfigError for a method that can't train beside a tensor axis; the error names those that can."""
    if method.not_on_mesh:
        able = [name for name in STRATEGIES if not strategy_named(name).not_on_mesh]
        raise ConfigError(
            f"{method.name} can't share a mesh with a tensor axis: it {method.not_on_mesh}; those that can: "
            f"{', '.join(able)}"
        )
