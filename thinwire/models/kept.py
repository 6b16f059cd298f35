"""Pruned matrices as dense matrices of their kept values: zeros stay zero, and nothing is sent for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thinwire.errors import ConfigError

MASKS = "masks.safetensors"


class KeptValues(nn.Module):
    """A matrix [..., out, in] stored as its kept values [rows, kept]; every row keeps equally many. All others are 0.

    A row runs along the dimension in which the mask keeps equally many: the last, or the one before it.
    """

    places: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.shape, self.is_last = mask.shape, even(mask)
        rows = self._rows(mask)
        places = rows.nonzero()[:, 1].view(len(rows), -1)
        self.register_buffer("places", places.to(torch.int32), persistent=False)

    def forward(self, kept: Tensor) -> Tensor:
        """The whole matrix."""
        width = self.shape[-1 if self.is_last else -2]
        rows = kept.new_zeros(len(kept), width).scatter(1, self.places.long(), kept)
        if self.is_last:
            return rows.view(self.shape)
        return rows.view(*self.shape[:-2], self.shape[-1], width).transpose(-1, -2)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The kept values of a matrix; the inverse of `forward`."""
        return self._rows(weight).gather(1, self.places.to(weight.device).long())

    def _rows(self, matrix: Tensor) -> Tensor:
        matrix = matrix if self.is_last else matrix.transpose(-1, -2)
        return matrix.reshape(-1, matrix.shape[-1])


def even(mask: Tensor) -> bool:
    """Whether each row of the last dimension keeps equally many; False: each row of the dimension before it.

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


def keep_folder(model: nn.Module, folder: Path) -> None:
    """Apply the masks that lie in a folder, if any."""
    if (folder / MASKS).is_file():
        from safetensors.torch import load_file

        keep(model, load_file(folder / MASKS))
