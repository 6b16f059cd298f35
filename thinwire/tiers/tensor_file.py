"""A .safetensors file, written and read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# In front of the tensors there is room for the names and shapes of so many bytes, about 2,000 tensors.
HEADER_BYTES, LENGTH_BYTES = 1 << 18, 8


class TensorFile:
    """A new file to which tensors are added, one behind another.

    The file begins with a header of fixed length, which the format allows to be padded with spaces. So nothing need be
    known of a tensor before it is there.

    num_bytes: of the tensors so far.
    """

    def __init__(self, path: Path) -> None:
        self.names: list[str] = []
        self.num_bytes = 0
        self._told = ['"__metadata__":{"format":"pt"}']
        self._room = HEADER_BYTES - LENGTH_BYTES - len("{" + self._told[0] + "}")
        self._file: BinaryIO = path.open("wb")
        self._file.seek(HEADER_BYTES)

    def takes(self, name: str, tensor: Tensor) -> bool:
        """Whether the header has room for a tensor, and its elements would lie aligned."""
        return len(self._line(name, tensor)) < self._room and self.num_bytes % tensor.element_size() == 0

    def add(self, name: str, tensor: Tensor, parts: Iterable[Tensor] | None = None) -> None:
        """Write a tensor behind the others. Raises OSError if the disk refuses it.

        parts: all of its rows in order, if they are made one after the other; `tensor` then has only shape and dtype.
        """
        line = self._line(name, tensor)
        for part in [tensor] if parts is None else parts:
            self._file.write(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        self._told.append(line)
        self._room -= len(line) + 1
        self.names.append(name)
        self.num_bytes += tensor.nbytes

    def close(self) -> None:
        """Write the header. Raises OSError if the disk refuses it."""
        header = ("{" + ",".join(self._told) + "}").encode().ljust(HEADER_BYTES - LENGTH_BYTES)
        with self._file:
            self._file.seek(0)
            self._file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)

    def _line(self, name: str, tensor: Tensor) -> str:
        """What the header says of a tensor behind the others, in ASCII."""
        told = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.num_bytes, self.num_bytes + tensor.nbytes],
        }
        return f"{json.dumps(name)}:{json.dumps(told)}"


class StoredTensors:
    """The tensors of a file, each read when it is asked for. They lie in memory of their own.

    A file that is mapped to be written to would count against a limit of this process's data, all of it.

    Raises SafetensorError for a damaged file, OSError if it can't be read.

    shapes: by name.
    """

    def __init__(self, path: Path) -> None:
        # It checks the header.
        with safe_open(path, "np"):
            self.path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        self._told, self._start = header, LENGTH_BYTES + length
        self.shapes = {name: torch.Size(told["shape"]) for name, told in header.items()}

    def read(self, name: str) -> Tensor:
        """The tensor of that name. Raises KeyError for another name, OSError if it can't be read."""
        told = self._told[name]
        tensor = torch.empty(told["shape"], dtype=DTYPES[told["dtype"]])
        start, stop = told["data_offsets"]
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._start + start)
            memory, done = tensor.view(-1).view(torch.uint8).numpy().data, 0
            while done < stop - start:
                done += file.readinto(memory[done:]) or _ended(self.path)
        return tensor


def _ended(path: Path) -> int:
    raise OSError(f"{path} ends too early")
