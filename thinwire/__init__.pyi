# What `thinwire/__init__.py` finds when it is asked for, for type checkers and editors.
from thinwire.adapters import attach as attach
from thinwire.calibration import calibrate as calibrate, measure_links as measure_links
from thinwire.codecs import (
    Cast as Cast,
    Codec as Codec,
    CountSketch as CountSketch,
    GaussianSketch as GaussianSketch,
    Hadamard as Hadamard,
    Identity as Identity,
    Integer as Integer,
    Natural as Natural,
    NonzeroRows as NonzeroRows,
    RandomK as RandomK,
    Sign as Sign,
    Threshold as Threshold,
    TopK as TopK,
    Twice as Twice,
    Zstd as Zstd,
)
from thinwire.collectives import (
    Communicator as Communicator,
    ElasticPeers as ElasticPeers,
    Peers as Peers,
    Topology as Topology,
    WorldPeers as WorldPeers,
    faults as faults,
    host_meeting as host_meeting,
)
from thinwire.compose import (
    PipelinedModel as PipelinedModel,
    Stage as Stage,
    parallelize as parallelize,
    pipeline as pipeline,
)
from thinwire.errors import (
    ConfigError as ConfigError,
    CorruptMessageError as CorruptMessageError,
    MismatchError as MismatchError,
    PeerLostError as PeerLostError,
    ThinwireError as ThinwireError,
)
from thinwire.expansion.expand import Expanded as Expanded, expand as expand
from thinwire.hosts.ddp.attach import CompressedDDP as CompressedDDP, compress_ddp as compress_ddp
from thinwire.hosts.experts import ExpertRanks as ExpertRanks, expert_parallel as expert_parallel
from thinwire.hosts.forward.optimizer import ForwardOptimizer as ForwardOptimizer, forward_only as forward_only
from thinwire.hosts.fsdp.compress import CompressedFSDP as CompressedFSDP, compress_fsdp as compress_fsdp
from thinwire.hosts.offload.hollow import hollow as hollow
from thinwire.hosts.sequence import (
    SequenceRanks as SequenceRanks,
    ring_attention as ring_attention,
    sequence_parallel as sequence_parallel,
    ulysses_attention as ulysses_attention,
)
from thinwire.hosts.sharded.optimizer import ShardedOptimizer as ShardedOptimizer
from thinwire.hosts.sharded.weights import whole as whole
from thinwire.hosts.sharded.wrap import zero as zero
from thinwire.islands.library import Islands as Islands
from thinwire.layout.formats import Strategy as Strategy
from thinwire.losses import cut_cross_entropy as cut_cross_entropy, cut_loss as cut_loss
from thinwire.methods.experts import ExpertParallel as ExpertParallel
from thinwire.methods.interface import Method as Method
from thinwire.methods.memory import Residency as Residency
from thinwire.methods.pipeline.border import Border as Border
from thinwire.methods.pipeline.options import Pipeline as Pipeline
from thinwire.methods.plain_ddp import DDP as DDP
from thinwire.methods.sequence import SequenceParallel as SequenceParallel
from thinwire.methods.sharded import ShardedMethod as ShardedMethod
from thinwire.methods.slope_log import SlopeLog as SlopeLog
from thinwire.models.kept import keep as keep
from thinwire.models.row_hooks import row_hooks as row_hooks
from thinwire.optim import (
    DGCSGD as DGCSGD,
    LANS as LANS,
    MFAC as MFAC,
    Apollo as Apollo,
    ApolloMini as ApolloMini,
    DionOptimizer as DionOptimizer,
    InverseFisher as InverseFisher,
    Muon as Muon,
    OneBitAdamW as OneBitAdamW,
)
from thinwire.placement import Placed as Placed, Placement as Placement, place as place
from thinwire.planner.plan import plan as plan
from thinwire.pruning.folder import unpack as unpack
from thinwire.pruning.prune import Pruned as Pruned, prune as prune
from thinwire.state.watchdog import DeadGradientError as DeadGradientError

__version__: str

# The classes of strategies.
from thinwire.registry import *  # noqa: F403
