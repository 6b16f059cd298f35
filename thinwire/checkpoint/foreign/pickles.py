"""Opens files that are pickles without running any code in them."""

from __future__ import annotations

import pickle
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from thinwire._compat import DCP_METADATA_CLASSES
from thinwire.errors import ConfigError, ThinwireError

# DeepSpeed and Megatron store objects of these packages beside the weights: settings, scalers, random states.
BESIDE_WEIGHTS = ("argparse", "deepspeed", "megatron", "numpy", "transformer_engine")
ALSO_BESIDE_WEIGHTS = ("_io.BytesIO",)


class Inert:
    """Placeholder for an object that is not needed: takes any arguments and any state, and does nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def load_pt(path: Path) -> dict[str, Any]:
    """Load the dictionary in a file written by `torch.save`. Tensors are memory-mapped, not read.

    Objects of the packages BESIDE_WEIGHTS become `Inert`; the packages need not be installed. Raises ConfigError, with
    the object's name, for a file that asks for any other object, and ThinwireError for a damaged file.
    """
    try:
        found = get_unsafe_globals_in_checkpoint(str(path))
        refused = sorted(name for name in found if not is_harmless(name))
        if refused:
            raise ConfigError(f"{path} asks for {', '.join(refused)}, which could run code: it is not opened")
        with safe_globals([(Inert, name) for name in found]):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{path} is refused: {str(error).splitlines()[0]}") from error
    except (RuntimeError, ValueError, EOFError, KeyError, IndexError) as error:
        raise ThinwireError(f"{path} is damaged, or was not written by torch.save: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}, not a dictionary of a checkpoint")
    return loaded


def is_harmless(name: str) -> bool:
    """Whether a class of this full name may be replaced by `Inert`."""
    return name.partition(".")[0] in BESIDE_WEIGHTS or name in ALSO_BESIDE_WEIGHTS


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler that knows only the classes of torch.distributed.checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class if it is one of the known classes; else raise UnpicklingError."""
        if (module, name) == ("builtins", "getattr"):
            # Python 3.11.0 to 3.11.3 write a member of an enumeration so.
            return member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in DCP_METADATA_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def member(enumeration: type[Enum], name: str) -> Enum:
    """Return the enumeration's member of this name; raise UnpicklingError for anything else that getattr would find."""
    if not isinstance(enumeration, EnumMeta) or name not in enumeration.__members__:
        raise pickle.UnpicklingError(f"builtins.getattr of {name!r}")
    return enumeration[name]


def load_metadata(path: Path) -> Metadata:
    """Load the metadata of a checkpoint of torch.distributed.checkpoint. Raises ConfigError for any other file."""
    try:
        with path.open("rb") as file:
            metadata = MetadataUnpickler(file).load()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{path} asks for {error}, which could run code: it is not opened") from error
    except (EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise ThinwireError(f"{path} is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ConfigError(f"{path} holds a {type(metadata).__name__}, not the metadata of a checkpoint")
    return metadata
