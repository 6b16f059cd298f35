"""`pipeline`: cuts a model and trains it in stages, without a mesh of your own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S
from thinwire.compose.parallelized import parallelize
from thinwire.compose.pipelined_model import PipelinedModel
from thinwire.errors import ConfigError, nearest_divisor
from thinwire.hosts.arguments import check_arguments
from thinwire.methods.interface import Method
from thinwire.methods.pipeline.across import ranks_across
from thinwire.methods.pipeline.options import Pipeline
from thinwire.models.tensor import cut_over


def pipeline(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    *,
    stages: int,
    tensor: int = 1,
    options: Pipeline | None = None,
    local_size: int | None = None,
    overlap: bool = False,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    checked: bool = False,
    initial: Callable[[str], Tensor] | None = None,
    announce: bool = True,
) -> PipelinedModel:
    """Cut a causal language model into `stages` and train it; `method` averages over the replicas of a stage.

    Args:
        model: called as model(tokens, targets=None); returns logits, or the mean loss if there are targets. All ranks
            start with the same weights. Afterwards the model holds the weights of this rank's stage only.
        optimizer: over the model's parameters. If `tensor` is above 1, it must not have taken a step yet.
        method: for the data axis, such as `thinwire.SDP4Bit()`; works if there are more ranks than stages x tensor.
        stages: `stages` x `tensor` must divide the number of ranks. The first ranks get the first stage, and so on,
            unless `options` say that replicas cross nodes.
        tensor: number of neighbouring ranks that cut the matrices of a stage's layers between them, by columns and by
            rows. Works for thinwire's models, and for models of transformers that state a plan. For others, use
            `parallelize_module` and `parallelize`.
        options: of the pipeline.
        local_size, overlap, seed, timeout_s, checked, initial, announce: as for `parallelize`.

    Raises ConfigError that lists everything that does not fit, before anything is sent.
    """
    check_arguments("pipeline", model, optimizer, stages=stages, tensor=tensor, local_size=local_size, overlap=overlap,
        seed=seed, timeout_s=timeout_s, checked=checked, announce=announce,
    )  # fmt: skip
    world_size = dist.get_world_size()
    for what, ranks, left in (("stages", stages, world_size), ("tensor ranks", tensor, world_size // max(1, stages))):
        if ranks < 1 or left % ranks:
            near = nearest_divisor(ranks, left)
            raise ConfigError(f"{ranks} {what} on {left} ranks: must divide them; nearest: {near}")
    device = next(iter(model.parameters())).device
    sizes = {"pipeline": stages, "data": world_size // stages // tensor} | ({"tensor": tensor} if tensor > 1 else {})
    options = options or Pipeline()
    laid_out = ranks_across(options.across, world_size, stages, tensor).view(*sizes.values())
    mesh = DeviceMesh(device.type, laid_out, mesh_dim_names=tuple(sizes))
    if tensor > 1:
        cut_with_optimizer(model, optimizer, mesh["tensor"])
    made = parallelize(
        model, optimizer, mesh, [options, method], local_size=local_size, overlap=overlap, seed=seed,
        timeout_s=timeout_s, checked=checked, initial=initial, announce=announce,
    )  # fmt: skip
    assert isinstance(made, PipelinedModel)
    return made


def cut_with_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """Cut the model by `cut_over`, and replace its parameters in the optimizer by their parts. Raises ConfigError."""
    if optimizer.state:
        raise ConfigError("the optimizer has taken steps with whole matrices: cut the model before the first")
    names = {id(param): name for name, param in model.named_parameters()}
    cut_over(model, mesh)
    parts = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parts[names[id(param)]] if id(param) in names else param for param in group["params"]]
