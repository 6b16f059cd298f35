"""Replicas of a model: made equal at the start, compared later."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.collectives import Communicator
from thinwire.device import check_current
from thinwire.errors import ConfigError, ThinwireError
from thinwire.table import Row


class ReplicaError(ThinwireError, RuntimeError):
    """The replicas of the model no longer have the same bits on all ranks."""


# A prime, so that the rows of no usual matrix fall on the same columns.
FINGERPRINT_COLUMNS = 4093


def digest(parts: Iterable[bytes | memoryview | Tensor]) -> Tensor:
    """A 16-byte hash of the bits of all parts, as uint8."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            # A cryptographic digest of all weights would hold up training at every checkpoint.
            part = fingerprint(part.detach().contiguous().view(-1)).to_bytes(8, "little", signed=True)
        state.update(part)
    return torch.frombuffer(bytearray(state.digest()), dtype=torch.uint8)


def fingerprint(values: Tensor) -> int:
    """A checksum of the bits, as 8-byte words, that depends on their order: edits, swaps and bit flips change it.

    values: flat and contiguous; an incomplete word at the end counts as one word.
    """
    octets = values.view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    num_words = octets.numel() // 8
    words = octets[: 8 * num_words].view(torch.int64)
    whole = num_words - num_words % FINGERPRINT_COLUMNS
    columns = words[:whole].view(-1, FINGERPRINT_COLUMNS).sum(0)
    columns[: num_words - whole] += words[whole:]
    total = int(columns.mul_(_odd_numbers(values.device)).sum())
    return hash((total, *octets[8 * num_words :].tolist()))


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * FINGERPRINT_COLUMNS, 2, device=device)


def odd_ranks(comm: Communicator, mine: Tensor) -> list[int]:
    """The ranks whose digest differs from the first rank's. A collective."""
    digests = comm.wait(comm.all_gather_exact(mine))
    return [comm.global_ranks[r] for r in range(comm.world_size) if not torch.equal(digests[r], digests[0])]


def same_options(comm: Communicator, asked: str) -> None:
    """Raise ConfigError if ranks ask for different options. A collective."""
    if odd := odd_ranks(comm, digest([asked.encode()])):
        raise ConfigError(f"rank {odd[0]} has other options than rank {comm.global_ranks[0]}; here: {asked}")


def compare_replicas(comm: Communicator, tensors: Iterable[Tensor], step: int, num_kinds: int = 1) -> None:
    """Raise ReplicaError that names the ranks whose tensors differ, bit for bit, from those of the first of their kind.

    num_kinds: rank r holds the same tensors as rank r % num_kinds. A collective.
    """
    # Who holds something alone needn't read it.
    if comm.world_size == num_kinds:
        return
    digests = comm.wait(comm.all_gather_exact(digest(tensors)))
    for first in range(num_kinds):
        alike = range(first, comm.world_size, num_kinds)
        odd = [comm.global_ranks[rank] for rank in alike if not torch.equal(digests[rank], digests[first])]
        if odd:
            raise ReplicaError(
                f"after step {step} the weights of rank(s) {odd} differ from rank {comm.global_ranks[first]}'s"
            )


def short_digest(content: object) -> str:
    """A hash of nested lists of strings and numbers, 16 hexadecimal digits."""
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def shapes_digest(trained: Mapping[str, Tensor]) -> str:
    """The same hash of the names and shapes of the trained tensors."""
    return short_digest([(name, tuple(tensor.shape)) for name, tensor in trained.items()])


def equal_bits(comm: Communicator, tensors: Iterable[Tensor]) -> bool:
    """Give all ranks the first rank's values if any differ. Return whether they were equal. A collective."""
    tensors = list(tensors)
    if not odd_ranks(comm, digest(tensors)):
        return True
    for tensor in tensors:
        whole = tensor.contiguous()
        comm.wait(comm.broadcast_(whole))
        tensor.copy_(whole)
    return False


def check_state(state: object, *needed: str) -> None:
    """Raise ConfigError if `state` lacks an entry of a state_dict."""
    held = list(state) if isinstance(state, Mapping) else []
    if missing := [name for name in needed if name not in held]:
        given = f"holds {', '.join(map(repr, held)) or 'nothing'}" if isinstance(state, Mapping) else f"is {state!r}"
        raise ConfigError(
            f"this state {given}, without {', '.join(map(repr, missing))}: must be what state_dict() of the same class "
            "returned"
        )


def check_layout(here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ConfigError that lists every entry in which a saved state's layout differs from this one."""
    differing = [f"{key}: saved {saved.get(key)!r}, here {here[key]!r}" for key in here if here[key] != saved.get(key)]
    if differing:
        raise ConfigError("this optimizer state does not fit: " + "; ".join(differing))


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The result of `fitting_parameters`, in order. Raises ConfigError if torch.distributed is not initialised."""
    if not dist.is_initialized():
        raise ConfigError("torch's wrappers need a process group: call torch.distributed.init_process_group first")
    return in_order(fitting_parameters(model, optimizer))


@torch.no_grad()
def in_order(named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The same parameters, whose elements lie in memory in the order of their indices from now on.

    Parameters in channels_last and transposed ones do not. torch's wrappers and checkpoints take elements as they lie.
    """
    for param in named.values():
        if not param.is_contiguous():
            param.data = param.data.contiguous()
    return named


# The attribute of a module of experts that names the ranks over which they are spread; set by `expert_parallel`.
SPREAD = "spread_over"


def refuse_spread(model: nn.Module) -> None:
    """Raise ConfigError for experts that lie on several ranks, for what would average them with other experts."""
    if any(SPREAD in vars(module) for module in model.modules()):
        raise ConfigError(
            "the experts lie on several ranks, and here each would be averaged with other experts; nearest: "
            "thinwire.zero, or thinwire.parallelize with an axis of islands"
        )


def fitting_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The model's trainable parameters by name. Raises ConfigError if they do not match the optimizer's."""
    refuse_spread(model)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    missing = [name for name, param in named.items() if id(param) not in held]
    if missing:
        raise ConfigError(f"{missing[0]!r} requires a gradient and is not in the optimizer: add it or freeze it")
    if len(held) > len({id(param) for param in model.parameters()} & held):
        raise ConfigError("the optimizer holds a parameter that the model does not have")
    if not named:
        raise ConfigError("no parameter requires a gradient: nothing to train")
    check_device(named)
    for name, param in named.items():
        if param.dtype != torch.float32:
            raise ConfigError(f"{name!r} is {param.dtype}: must be float32")
    return named


def updates_any(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor]) -> bool:
    """Whether the optimizer holds one of these tensors, or a plain tensor that shares memory with one."""
    own = {id(tensor) for tensor in tensors}
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors if not isinstance(tensor, DTensor)}
    for group in optimizer.param_groups:
        for param in group["params"]:
            shares = not isinstance(param, DTensor) and param.untyped_storage().data_ptr() in memory
            if id(param) in own or shares:
                return True
    return False


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that updates the weights, inside a wrapper such as Accelerate's."""
    held = getattr(optimizer, "optimizer", None)
    return held if isinstance(held, torch.optim.Optimizer) else optimizer


def check_updates(optimizer: object, tensors: Sequence[Tensor], wrapped_by: str) -> None:
    """Raise ConfigError unless `optimizer` is an optimizer that holds one of the model's parameters.

    tensors: the model's parameters, and plain tensors in their memory. wrapped_by: the call that may have replaced
    them.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}: must be the torch.optim.Optimizer of this model")
    if not updates_any(optimizer, tensors):
        raise ConfigError(
            f"the optimizer, {type(optimizer).__name__}, holds no parameter of this model: make it from "
            f"model.parameters(), after {wrapped_by}"
        )


def check_device(named: Mapping[str, nn.Parameter]) -> torch.device:
    """The device of all these parameters: the CPU, or the current CUDA device. Raises ConfigError for any other."""
    device = next(iter(named.values())).device
    for name, param in named.items():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name!r} has no shape yet: call the model once on a batch, then make the optimizer")
        if param.device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"{name!r} is on device {param.device}: it must be materialised on the CPU or a CUDA device"
            )
        if param.device != device:
            raise ConfigError(f"{name!r} is on {param.device} and others are on {device}: one process trains on one")
    check_current(device)
    return device


def arithmetic_rows(comm: Communicator, sample: Sequence[Tensor]) -> list[Row]:
    """A row if ranks compute other bits from the same numbers. A collective, of no message without a sample.

    sample: what every rank of a method computes by itself, from fixed numbers.
    """
    if not sample or not (odd := odd_ranks(comm, digest(sample))):
        return []
    effect = f"rank {odd[0]} computes other bits than rank {comm.global_ranks[0]}"
    why = "replicas will drift apart: take processors of one kind, and the same versions of torch and numba"
    return [("equal arithmetic on all ranks", effect, why)]


def same_start(model: nn.Module, comm: Communicator) -> Row:
    """Give all ranks the first rank's weights and buffers, sending them only if they differ. A collective.

    Raises ConfigError if names, shapes or dtypes differ.
    """
    tensors = {name: t.data for name, t in [*model.named_parameters(), *model.named_buffers()]}
    shapes = repr([(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()])
    if odd := odd_ranks(comm, digest([shapes.encode()])):
        raise ConfigError(
            f"rank {odd[0]} has another model than rank {comm.global_ranks[0]}: names, shapes and dtypes must be the "
            "same on all ranks"
        )
    asked = "equal replicas at start"
    if equal_bits(comm, tensors.values()):
        return asked, "nothing sent", "they were equal already"
    return asked, f"{len(tensors)} tensors sent by rank {comm.global_ranks[0]}", "they differed"
