"""Pruned matrices as dense matrices of their kept values: zeros stay zero, and nothing is sent for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thinwire.errors import ConfigError
from thinwire.tiers.tensor_file import StoredTensors

MASKS, PACKED = "masks.safetensors", "packed.safetensors"
# Behind the name of a matrix: one bit for each weight, 1 where it is kept.
BITS = ".kept"


class KeptValues(nn.Module):
    """A matrix [..., out, in] stored as its kept values [..., rows, kept]; every row keeps equally many. Others are 0.

    A row runs along the dimension in which the mask keeps equally many: the last, or the one before it. The kept values
    of each of several experts are one range of memory.

    Attributes:
        places: of the kept values in their rows, int32 in their shape.
    """

    places: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.is_last = even(mask)
        rows = self._rows(mask)
        self.width = rows.shape[-1]
        places = rows.nonzero()[:, -1].view(*rows.shape[:-1], -1)
        self.register_buffer("places", places.to(torch.int32), persistent=False)

    def forward(self, kept: Tensor) -> Tensor:
        """The whole matrix."""
        # Earlier versions saved the rows of all experts as one matrix.
        kept = kept.view(self.places.shape)
        return self._rows(kept.new_zeros(*kept.shape[:-1], self.width).scatter(-1, self.places.long(), kept))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The kept values of a matrix; the inverse of `forward`."""
        return self._rows(weight).gather(-1, self.places.to(weight.device).long())

    def _rows(self, matrix: Tensor) -> Tensor:
        """Rows as the last dimension, and back."""
        return matrix if self.is_last else matrix.transpose(-1, -2)


def even(mask: Tensor) -> bool:
    """True if rows of the last dimension keep equally many weights, False if rows of the dimension before it do.

    Raises ConfigError if neither does.
    """
    for dim in (-1, -2):
        counts = mask.sum(dim)
        if bool((counts == counts.flatten()[0]).all()):
            return dim == -1
    raise ConfigError(
        "a mask keeps different numbers of weights in its rows; nearest: one that thinwire prune has made"
    )


def keep(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Train each masked parameter as the matrix of its kept values, in place.

    A parameter `layer.weight` becomes `layer.parametrizations.weight.original`, with as many elements as the mask
    keeps.

    Args:
        masks: by name of the parameter, bool of its shape, True where a weight is kept.

    Raises ConfigError for a name or a shape that the model does not have.
    """
    parameters = dict(model.named_parameters())
    for name, mask in masks.items():
        if name not in parameters or parameters[name].shape != mask.shape:
            raise ConfigError(f"the mask of {name} fits no parameter of the model: prune it again")
        place, _, own = name.rpartition(".")
        kept = KeptValues(mask).to(parameters[name].device)
        parametrize.register_parametrization(model.get_submodule(place), own, kept, unsafe=True)


def whole(model: nn.Module) -> None:
    """Undo `keep`, in place: parameters get their names and shapes back, with zeros."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            assert isinstance(module.parametrizations, nn.ModuleDict)
            for name in list(module.parametrizations):
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def is_pruned(folder: Path) -> bool:
    """Whether a folder of transformers holds masks of pruned weights."""
    return (folder / MASKS).is_file() or (folder / PACKED).is_file()


def keep_folder(model: nn.Module, folder: Path) -> None:
    """Apply the masks that lie in a folder, if any."""
    keep(model, masks_in(folder, {name: param.shape for name, param in model.named_parameters()}))


def write_packed(model: nn.Module, masks: Mapping[str, Tensor], folder: Path) -> None:
    """Write a pruned model: a bit for each weight, whether it is kept, and the kept weights; all numbers in bf16.

    A matrix of n weights with a share s of zeros takes n / 8 + 2 n (1 - s) bytes, in place of 2 n.
    """
    from safetensors.torch import save_file

    tensors = {}
    for name, tensor in held(model).items():
        if (mask := masks.get(name)) is not None:
            tensors[name + BITS] = torch.from_numpy(np.packbits(mask.flatten().cpu().numpy()))
            tensor = tensor[mask]
        tensors[name] = (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
    save_file(tensors, folder / PACKED, metadata={"format": "pt"})


@torch.no_grad()
def read_packed(model: nn.Module, folder: Path) -> None:
    """Fill a model with the weights that `write_packed` wrote. Raises ConfigError for those of another model."""
    stored = StoredTensors(folder / PACKED)
    masks = masks_in(folder, {name: param.shape for name, param in model.named_parameters()})
    tensors = {name: stored.read(name) for name in stored.shapes if not name.endswith(BITS)}
    own = held(model)
    if odd := own.keys() ^ tensors.keys():
        raise ConfigError(f"{folder / PACKED} is of another model: {min(odd)} is in one of both alone")
    for name, tensor in own.items():
        values, mask = tensors[name], masks.get(name)
        if values.numel() != (tensor.numel() if mask is None else int(mask.sum())):
            raise ConfigError(f"{folder / PACKED} is of another model: {name} has {values.numel()} numbers")
        if mask is None:
            tensor.copy_(values.view(tensor.shape))
        else:
            tensor.zero_()[mask] = values.to(tensor.dtype)


def masks_in(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The masks of a folder, all at once. shapes: of the model's parameters."""
    return {name: read() for name, read in mask_readers(folder, shapes).items()}


def mask_readers(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Callable[[], Tensor]]:
    """What reads the mask of each pruned matrix in a folder, by its name. shapes: of the model's parameters."""
    if (folder / PACKED).is_file():
        bits = StoredTensors(folder / PACKED)
        names = [key.removesuffix(BITS) for key in bits.shapes if key.endswith(BITS)]
        return {name: partial(_unpacked, bits, name, shapes[name]) for name in names if name in shapes}
    if not (folder / MASKS).is_file():
        return {}
    masks = StoredTensors(folder / MASKS)
    return {name: partial(masks.read, name) for name in masks.shapes}


def _unpacked(stored: StoredTensors, name: str, shape: torch.Size) -> Tensor:
    bits = np.unpackbits(stored.read(name + BITS).numpy(), count=shape.numel())
    return torch.from_numpy(bits).bool().view(shape)


def held(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state_dict, each once, under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return {name: tensor.detach() for name, tensor in found.values()}
