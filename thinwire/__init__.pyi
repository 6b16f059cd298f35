# What `thinwire/__init__.py` finds when it is asked for, for type checkers and editors.
from typing import Any

from thinwire.adapters import (
    attach as attach,
)
from thinwire.codecs import (
    Cast as Cast,
)
from thinwire.codecs import (
    Codec as Codec,
)
from thinwire.codecs import (
    CountSketch as CountSketch,
)
from thinwire.codecs import (
    GaussianSketch as GaussianSketch,
)
from thinwire.codecs import (
    Hadamard as Hadamard,
)
from thinwire.codecs import (
    Identity as Identity,
)
from thinwire.codecs import (
    Integer as Integer,
)
from thinwire.codecs import (
    Natural as Natural,
)
from thinwire.codecs import (
    RandomK as RandomK,
)
from thinwire.codecs import (
    Sign as Sign,
)
from thinwire.codecs import (
    Threshold as Threshold,
)
from thinwire.codecs import (
    TopK as TopK,
)
from thinwire.codecs import (
    Twice as Twice,
)
from thinwire.codecs import (
    Zstd as Zstd,
)
from thinwire.collectives import (
    Communicator as Communicator,
)
from thinwire.collectives import (
    ElasticPeers as ElasticPeers,
)
from thinwire.collectives import (
    Peers as Peers,
)
from thinwire.collectives import (
    Topology as Topology,
)
from thinwire.collectives import (
    WorldPeers as WorldPeers,
)
from thinwire.collectives import (
    faults as faults,
)
from thinwire.collectives import (
    host_meeting as host_meeting,
)
from thinwire.compose import Stage as Stage
from thinwire.compose import parallelize as parallelize
from thinwire.errors import (
    ConfigError as ConfigError,
)
from thinwire.errors import (
    CorruptMessageError as CorruptMessageError,
)
from thinwire.errors import (
    MismatchError as MismatchError,
)
from thinwire.errors import (
    PeerLostError as PeerLostError,
)
from thinwire.errors import (
    ThinwireError as ThinwireError,
)
from thinwire.hosts.ddp.attach import (
    CompressedDDP as CompressedDDP,
)
from thinwire.hosts.ddp.attach import (
    compress_ddp as compress_ddp,
)
from thinwire.hosts.fsdp.compress import (
    CompressedFSDP as CompressedFSDP,
)
from thinwire.hosts.fsdp.compress import (
    compress_fsdp as compress_fsdp,
)
from thinwire.hosts.islands.library import (
    Islands as Islands,
)
from thinwire.hosts.one_byte.optimizer import (
    OneByteOptimizer as OneByteOptimizer,
)
from thinwire.hosts.one_byte.optimizer import (
    one_byte as one_byte,
)
from thinwire.hosts.sharded.optimizer import (
    ShardedOptimizer as ShardedOptimizer,
)
from thinwire.hosts.sharded.wrap import (
    zero as zero,
)
from thinwire.layout.formats import (
    Strategy as Strategy,
)
from thinwire.methods.data.ddp import (
    DDP as DDP,
)
from thinwire.methods.data.dgc import (
    DGC as DGC,
)
from thinwire.methods.data.feedback import (
    EFInteger as EFInteger,
)
from thinwire.methods.data.feedback import (
    EFTopK as EFTopK,
)
from thinwire.methods.data.frontier import (
    Frontier as Frontier,
)
from thinwire.methods.data.fsdp import (
    FSDP as FSDP,
)
from thinwire.methods.data.lgreco import (
    LGreCo as LGreCo,
)
from thinwire.methods.data.one_byte import (
    OneByte as OneByte,
)
from thinwire.methods.data.onebit_adam import (
    OneBitAdam as OneBitAdam,
)
from thinwire.methods.data.powersgd import (
    PowerSGD as PowerSGD,
)
from thinwire.methods.data.sdp4bit import (
    SDP4Bit as SDP4Bit,
)
from thinwire.methods.data.sketch import (
    Sketch as Sketch,
)
from thinwire.methods.data.torch_powersgd import (
    TorchPowerSGD as TorchPowerSGD,
)
from thinwire.methods.data.two_way import (
    TwoWay as TwoWay,
)
from thinwire.methods.data.zero import (
    Zero as Zero,
)
from thinwire.methods.data.zero import (
    ZeroBF16 as ZeroBF16,
)
from thinwire.methods.data.zero_compressed import (
    ZeroCompressed as ZeroCompressed,
)
from thinwire.methods.data.zeropp import (
    ZeroPP as ZeroPP,
)
from thinwire.methods.interface import (
    Method as Method,
)
from thinwire.methods.one_byte_log import (
    OneByteLog as OneByteLog,
)
from thinwire.methods.sharded import (
    ShardedMethod as ShardedMethod,
)
from thinwire.optim import (
    DGCSGD as DGCSGD,
)
from thinwire.optim import (
    LANS as LANS,
)
from thinwire.optim import (
    Muon as Muon,
)
from thinwire.optim import (
    OneBitAdamW as OneBitAdamW,
)
from thinwire.registry import (
    STRATEGIES as STRATEGIES,
)
from thinwire.registry import (
    strategy_named as strategy_named,
)
from thinwire.state.watchdog import (
    DeadGradientError as DeadGradientError,
)

__version__: str

# With a model first they make a context around a loop, else a method's options: no type says both.
DADAO: Any
DiLoCo: Any
FedFix: Any
Gossip: Any
LocalSGD: Any
SparseLoCo: Any
StreamingDiLoCo: Any
