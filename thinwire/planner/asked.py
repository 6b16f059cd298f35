"""What `thinwire explain` is asked about: strategies, links, ranks and a model."""

from __future__ import annotations

import math

import torch
from torch import nn

from thinwire.calibration import matrix_flops
from thinwire.cost import Links
from thinwire.data import load_tokenizer
from thinwire.device import Device
from thinwire.errors import ConfigError, nearest_divisor
from thinwire.layout.mesh import MeshShape
from thinwire.methods.interface import Method
from thinwire.methods.sequence.traffic import DELAY_S, LOCAL_RATE, RATE
from thinwire.models import PRESETS, Llama, build_skeleton
from thinwire.options import model_table
from thinwire.planner.experts import check_free, with_splits
from thinwire.planner.options import AUTO, ExplainConfig
from thinwire.planner.settings import make
from thinwire.planner.stages import Grid
from thinwire.report.units import short
from thinwire.run.config import most_stages

NUM_LAYERS, WIDTH = 32, 1024


def strategy_of(name: str, config: ExplainConfig) -> Method:
    """A strategy with its options. Raises ConfigError."""
    return make(name, config.tables)


def vocabulary_of(config: ExplainConfig, model: nn.Module) -> str:
    """A note if a preset's vocabulary is not its usual one, with the usual number of parameters."""
    own = PRESETS.get(config.model)
    if own is None or not isinstance(model, Llama) or model.config.vocab_size == own.vocab_size:
        return ""
    overrides = {**(config.tables.get(model_table(config.model) or "") or {}), "vocab_size": own.vocab_size}
    usual = build_skeleton(config.model, own.vocab_size, config.seq_len, overrides)
    return (
        f"the vocabulary is the {model.config.vocab_size:,} tokens of --tokenizer {config.tokenizer}; with the "
        f"{own.vocab_size:,} of {config.model}: {short(sum(param.numel() for param in usual.parameters()))}"
    )


def mesh_of(config: ExplainConfig) -> MeshShape:
    """The axes of the ranks. Raises ConfigError for a mesh that does not match the number of ranks."""
    num_ranks = config.nodes * config.local_size
    shape = MeshShape({"data": num_ranks}) if config.mesh is None else MeshShape.parse(config.mesh)
    shape = with_splits(config, shape)
    stages = config.num_stages
    if config.stages == AUTO and (config.mesh is not None or config.tensor not in (None, 1, AUTO)):
        raise ConfigError(
            f"--stages {AUTO} finds the mesh: leave --mesh and --tensor out; or --tensor {AUTO}, which is found too"
        )
    if config.tensor == AUTO and config.stages != AUTO:
        raise ConfigError(f"--tensor {AUTO} is found beside the stages; nearest: --stages {AUTO} --tensor {AUTO}")
    if stages is not None and stages != shape.pipeline:
        if config.mesh is not None:
            raise ConfigError(f"--stages {stages} beside --mesh {config.mesh}: leave one of them out")
        if num_ranks % stages:
            most = most_stages(config.model, config.tables) if config.parameters is None else math.inf
            near = f"--stages {nearest_divisor(stages, num_ranks, most)}"
            near += f", or --nodes {stages} --local-size 1" if stages <= most else ""
            raise ConfigError(f"--stages {stages}: must divide the {num_ranks} ranks; nearest: {near}")
        shape = MeshShape({"pipeline": stages, "data": num_ranks // stages})
    tensor, left = config.tensor if isinstance(config.tensor, int) else 1, shape.sizes["data"]
    if tensor > 1 and tensor != shape.tensor:
        check_free("--tensor", tensor, left, config)
        shape = MeshShape({**shape.sizes, "data": left // tensor, "tensor": tensor})
    if shape.sizes.get("island") == config.nodes:
        shape = shape.without_islands()
    if shape.island_size is not None:
        raise ConfigError(
            f"--mesh {config.mesh}: here every node is an island of strategies that have any; nearest: "
            f"--nodes {shape.sizes['island']} --local-size {shape.island_size}, without --mesh"
        )
    if shape.world_size != num_ranks:
        raise ConfigError(
            f"--mesh {config.mesh} has {shape.world_size} ranks, and {config.nodes} nodes of {config.local_size} have "
            f"{num_ranks}: the two must be equal; nearest: --nodes {shape.world_size} --local-size 1, or other axes"
        )
    return shape


def check_can_cut(model: nn.Module) -> Llama:
    """The model, if its layers are known here. Raises ConfigError."""
    if type(model) is not Llama:
        raise ConfigError("stages: only presets such as demo, without experts, can be priced here")
    return model


def links_of(config: ExplainConfig, rate: float | None, local_rate: float | None) -> Links:
    """Links of the stated bits per second, or of usual ones."""
    inter, intra = (usual if each is None else each / 8 for each, usual in ((rate, RATE), (local_rate, LOCAL_RATE)))
    return Links.stated(inter, intra, DELAY_S, config.local_size)


def grid_of(config: ExplainConfig, rate: float | None, local_rate: float | None) -> Grid:
    """The machines; their speed is that of this process unless it is stated."""
    flops = matrix_flops(torch.float32, Device()) if config.gflops is None else config.gflops * 1e9
    own, inside = (None if each is None else each / 8 for each in (rate, local_rate))
    return Grid(config.nodes, config.local_size, flops, own, inside)


def tokens_of(config: ExplainConfig) -> int:
    """Tokens of a rank's step."""
    return config.passes * config.micro_batch * config.seq_len


def model_of(config: ExplainConfig) -> nn.Module:
    """The model, or a stand-in with that many parameters, on the device "meta". Raises ConfigError."""
    if config.parameters is not None:
        return stand_in(int(config.parameters))
    tokenizer = load_tokenizer(config.tokenizer)
    overrides = config.tables.get(model_table(config.model) or "")
    return build_skeleton(config.model, tokenizer.vocab_size, config.seq_len, overrides)


def stand_in(num_parameters: int) -> nn.Module:
    """Layers of one matrix each, of nearly equal sizes, and one matrix of a single row for the remainder."""
    rows, rest = divmod(num_parameters, WIDTH)
    sizes = [(rows // NUM_LAYERS + (layer < rows % NUM_LAYERS), WIDTH) for layer in range(NUM_LAYERS)]
    shapes = [shape for shape in (*sizes, (1, rest)) if shape[0] * shape[1]]
    model = nn.Module()
    model.layers = nn.ModuleList(matrix(shape) for shape in shapes)
    return model


def matrix(shape: tuple[int, int]) -> nn.Module:
    """A module with one weight."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape, device="meta"))
    return module
